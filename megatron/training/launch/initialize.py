# SPDX-License-Identifier: Apache-2.0
"""The first things a process does: find its place, its device and its peers, and seed its random numbers."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from megatron.core import device as device_module
from megatron.core.collectives import all_reduce
from megatron.core.context_parallel.planning import count_ranks_of_sample
from megatron.core.device_kernels import activate_flash_attention
from megatron.core.device_links import gpus_have_links
from megatron.core.dist_checkpointing.crash_points import arm
from megatron.core.errors import ConfigError, explain_refused_memory, format_bytes
from megatron.core.host_memory import keep_freed_host_memory
from megatron.core.kernels.launching import find_obstacle
from megatron.core.mesh import DEFAULT_ORDER, PIPELINE_BEFORE_DATA_ORDER, RankGrid
from megatron.core.open_files import require_open_files
from megatron.core.parent_death import end_with_parent
from megatron.core.plan.stages import build_virtual_stages, find_embedding_use
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.fused_collectives import is_new_enough
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.core_attention.attention_trial import choose_attention_way
from megatron.training.config.container import RunConfig
from megatron.training.config.distributed import DistributedInitConfig
from megatron.training.config.gpu_needs import replace_gpu_settings
from megatron.training.flags.declarations import flags_by_spelling
from megatron.training.flags.parser import ExtraFlags
from megatron.training.flags.read import read_run_config
from megatron.training.launch.connections import Connections
from megatron.training.launch.hang_watch import HangWatch, build_hang_watch
from megatron.training.launch.launch import Launch, add_world_size, read_launch
from megatron.training.launch.presence import Presence
from megatron.training.launch.rendezvous import StartupCheck, open_store
from megatron.training.launch.seat import Seat
from megatron.training.launch.sites import MeetingPoint, find_meeting_point, take_site


@dataclass(frozen=True)
class Process:
    """This process's place in the job, its device and its groups."""

    launch: Launch
    device: torch.device
    groups: ProcessGroupCollection
    notes: tuple[str, ...] = ()
    """Settings that the device cannot obey, each with what takes its place."""
    presence: Presence | None = None
    """With several processes: which of them are still there."""
    connections: Connections | None = None
    """Of its groups, with several processes."""
    watch: HangWatch | None = None
    """With several processes: what tells when the job is hung, and for whom it waits."""
    meeting_point: MeetingPoint | None = None
    """Of the sites among which the ranks of one job were divided."""


def initialize(config: RunConfig, seat: Seat | None = None) -> Process:
    """Join the job and seed. One process opens no port and needs no process group.

    seat: this process's place where the job begins again inside its processes; as the environment says when None.

    On the CPU, settings that only a GPU can follow give way in `config`, where that changes no number.

    Raises ConfigError for an environment that cannot be used or ranks that were started differently, TopologyError for
    a layout that does not fit, TemporaryError when peers do not come within --distributed-timeout-minutes.
    """
    launch = find_launch() if seat is None else seat.launch
    if seat is not None:
        _tell_environment(seat)
    launch = take_site(config, launch)
    if dist.is_initialized() and (dist.get_rank(), dist.get_world_size()) != (launch.rank, launch.world_size):
        raise ConfigError(
            f"torch.distributed runs as rank {dist.get_rank()} of {dist.get_world_size()}, and the environment says "
            f"RANK={launch.rank}, WORLD_SIZE={launch.world_size}; set both to what torch.distributed has"
        )
    if crash_point := os.environ.get("MEGATRON_CRASH_POINT"):
        arm(crash_point, launch.rank)
    require_open_files(config.data.num_workers)
    if config.logger.logging_level is not None:
        logging.basicConfig()
        logging.getLogger().setLevel(config.logger.logging_level)
    # Before torch touches the device: CUDA and cuBLAS read these variables once, when they start.
    _prepare_environment(config, launch)
    device = device_module.current_device()
    device_module.activate(device)
    # Before peers compare their settings, so that one without a GPU among others is named.
    notes = [] if device_module.is_cuda(device) else replace_gpu_settings(config)
    if config.model.deterministic_mode:
        device_module.use_deterministic_algorithms()
    if not device_module.is_cuda(device):
        keep_freed_host_memory()
    device_module.allow_bf16_reduced_precision_sums(not config.model.disable_bf16_reduced_precision_matmul)
    if config.model.flash_attention_version is not None:
        activate_flash_attention(config.model.flash_attention_version)
    # Before ranks meet: every rank refuses a layout that does not fit by itself, without a time-out.
    grid = build_rank_grid(config, launch.world_size)
    timeout = timedelta(minutes=config.distributed.distributed_timeout_minutes)
    # A program that has joined the processes itself (Ray's do) watches over them itself.
    if launch.agent_store and seat is None and not dist.is_initialized():
        # torchrun itself may be killed. Its processes would train on next to the restarted job's.
        end_with_parent(os.getppid())
    presence = watch = connections = meeting_point = None
    is_joined = dist.is_initialized()
    store = None if seat is None else seat.store
    if store is None and not is_joined and (launch.whole or launch).world_size > 1:
        store = open_store(launch.whole or launch, timeout.total_seconds())
    if launch.whole is not None:
        if store is None:
            raise ConfigError("--diloco-replicas divides the ranks into sites itself; leave init_process_group() to us")
        meeting_point = find_meeting_point(launch, store)
        store = PrefixStore(f"site{config.sites.datacenter_id}", store)
    if launch.world_size > 1 and not is_joined:
        assert store is not None
        presence, watch, connections = _join(config, launch, seat, device, store)
    with contextlib.nullcontext() if connections is None else connections.noting():
        urgent = config.distributed.high_priority_stream_groups
        groups = ProcessGroupCollection.build(grid, launch.rank, timeout, urgent)
        made = connect_groups(groups, config, device)
    if made is not None:
        notes.append(made)
    data = config.data
    has_documents = config.packs_samples or data.reset_attention_mask
    chosen = choose_attention_way(config.model, data.seq_length or 1, device, groups, has_documents=has_documents)
    if chosen is not None:
        notes.append(chosen)
    # For code written against upstream, which asks parallel_state instead of being handed its groups.
    groups.set_current()
    # Needs the groups: which random numbers a process draws depends on its place in the layout.
    set_seeds(config.model.seed, groups)
    return Process(launch, device, groups, tuple(notes), presence, connections, watch, meeting_point)


def _join(
    config: RunConfig, launch: Launch, seat: Seat | None, device: torch.device, store: Store
) -> tuple[Presence, HangWatch | None, Connections]:
    """Meet the other processes in torch's default group, and watch over each other."""
    timeout = timedelta(minutes=config.distributed.distributed_timeout_minutes)
    backend = config.distributed.distributed_backend or device_module.choose_backend(device)
    patience = timeout.total_seconds() if seat is None else seat.patience_seconds
    # Ranks with different flags would hang in a collective that only some of them reach; here they get a sentence.
    gpu = device_module.identify_gpu(device) if backend == "nccl" else None
    check = StartupCheck(store, launch.rank, launch.world_size, patience)
    check.check(config.flag_values(), gpu, {"kernels in Triton": find_obstacle(device)})
    # Never with `device_id`, although torch suggests it: communicators are then made at once, and sends and receives of
    # pipeline stages go through their whole group's, in one order with all else that it carries, where those that are
    # posted early can wait for each other for ever.
    connections = Connections()
    if seat is not None:
        seat.cut = connections.cut
    with connections.noting():
        dist.init_process_group(
            backend=backend,
            store=store,
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timeout,
        )
    presence = Presence(launch, store)
    watch = build_hang_watch(config, launch, store, connections.cut)
    if seat is not None:
        seat.give_back_later(presence.close)
        if watch is not None:
            seat.give_back_later(watch.close)
    return presence, watch, connections


_USED_GROUPS = ("world", "tp", "pp", "cp", "hcp", "dp_cp", "mp", "optimizer_shards", "optimizer_copies")
_GROUPS_OF_EXPERTS = (
    "tp_cp", "tp_dp_cp", "ep", "expt_tp", "expt_dp", "tp_ep", "tp_ep_pp", "expert_optimizer_shards",
    "expert_optimizer_copies",
)  # fmt: skip


def connect_groups(groups: ProcessGroupCollection, config: RunConfig, device: torch.device) -> str | None:
    """Make NCCL's communicators of the groups that a step uses, and return a note on the memory that they take; None
    where there are none to make.

    NCCL makes a communicator when its group first communicates, which would be in the first step, when memory is full:
    each takes some hundred MB. Connections between pipeline stages are made by p2p_communication.py.
    """
    if config.world_size == 1 or dist.get_backend() != "nccl":
        return None
    before = device_module.read_used_memory_bytes()
    token = torch.zeros(1, device=device)
    fields = [*_USED_GROUPS, *(["embd"] if config.ties_embeddings else [])]
    if config.model.num_moe_experts is not None:
        fields += _GROUPS_OF_EXPERTS
    # In the order of the fields, the same on all ranks: members of a group then meet in it one after the other.
    distinct = groups.list_distinct(fields)
    for group in distinct:
        all_reduce(token, group)
    device_module.synchronize()
    taken = max(0, device_module.read_used_memory_bytes() - before)
    return f"communicators of {len(distinct)} process groups were made and take {format_bytes(taken)} of this GPU"


def _tell_environment(seat: Seat) -> None:
    """Set RANK and WORLD_SIZE, until the seat is left, for code that reads them: the process may have another place
    than its launcher gave it."""
    for name, number in (("RANK", seat.launch.rank), ("WORLD_SIZE", seat.launch.world_size)):
        seat.give_back_later(functools.partial(_set_variable, name, os.environ.get(name)))
        _set_variable(name, str(number))


def _set_variable(name: str, value: str | None) -> None:
    """Of the environment; none where the value is None."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def find_launch() -> Launch:
    """Return what this process's launcher says of its place. Raises ConfigError."""
    return read_launch(os.environ)


def read_place() -> tuple[int, int, int]:
    """(rank, number of processes, rank on this node) as the environment says; (0, 1, 0) otherwise."""
    numbers = (os.environ.get(name, default) for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    rank, size, local = (int(number) if str(number).isdecimal() else 0 for number in numbers)
    return rank, max(1, size), local


def read_command_line(
    extra_flags: ExtraFlags | None,
    defaults: Mapping[str, Any],
    *,
    trains: bool = True,
    words: Sequence[str] | None = None,
) -> RunConfig:
    """The settings of this process's command line; `defaults` (setting -> value) stand before it and give way. trains:
    see read_run_config. words: the command line; this process's when None."""
    leading: list[str] = []
    words = sys.argv[1:] if words is None else words
    written = {word.partition("=")[0] for word in words}
    for setting, value in defaults.items():
        name = f"--{setting.replace('_', '-')}"
        flag = flags_by_spelling().get(name)
        gives_way = flag is not None and not written.isdisjoint(flag.spellings)
        if value is not False and value is not None and not gives_way:
            leading += [name, *([] if value is True else [str(value)])]
    return read_run_config([*leading, *words], add_world_size(os.environ), extra_flags, trains=trains)


def shut_down() -> None:
    """Destroy the process groups, after a run that has succeeded."""
    ProcessGroupCollection.clear_current()
    if dist.is_initialized():
        dist.destroy_process_group()


def explain_lost_peer(error: RuntimeError, presence: Presence | None = None) -> str | None:
    """The sentence for a collective that failed because another rank is gone; None for other errors. presence: names
    the rank, where that can be found out, which takes up to some seconds."""
    # gloo raises plain RuntimeErrors; its file names in the text are all that marks them.
    communication = isinstance(error, dist.DistError) or "gloo" in str(error)
    # NCCL takes memory of the GPU, too, and raises its own error where there is none.
    if not communication or explain_refused_memory(error) is not None:
        return None
    reason = " ".join(str(error).split())[:200]
    lost = [] if presence is None else presence.find_lost_ranks()
    if not lost:
        who, where = "another rank was lost or did not answer in time", "the other ranks' logs"
    elif len(lost) == 1:
        who, where = f"another rank was lost: rank {lost[0]} has ended", "its log"
    else:
        who, where = f"other ranks were lost: ranks {', '.join(map(str, lost))} have ended", "their logs"
    return f"{who} ({reason}); look at {where}, then start again"


def explain_nondeterminism(error: RuntimeError) -> str | None:
    """The sentence for an operation that --deterministic-mode does not allow; None for other errors."""
    if "deterministic implementation" not in str(error):
        return None
    return f"--deterministic-mode: {' '.join(str(error).split())[:160]}; leave the option that needs it out"


def set_seeds(seed: int, groups: ProcessGroupCollection) -> None:
    """Seed Python, numpy and torch. Weights have separate generators; this is for dropout and user code.

    Pipeline stages draw different numbers. Data-parallel replicas draw the same ones, as upstream; tensor-parallel
    ranks have a common stream, and each a private one.
    """
    seed += 100 * groups.pp.rank()
    random.seed(seed)
    # numpy takes 32 bits only.
    np.random.seed(seed % 2**32)
    model_parallel_cuda_manual_seed(seed, pg_collection=groups)


def build_rank_grid(config: RunConfig, world_size: int) -> RankGrid:
    """Build the grid that says who is who among `world_size` processes. Raises TopologyError for a layout that does not
    fit."""
    model = config.model
    divides = config.ddp.use_distributed_optimizer or config.ddp.use_torch_fsdp2
    instances = config.ddp.num_distributed_optimizer_instances if divides else 1
    return RankGrid(
        world_size,
        tp=model.tensor_model_parallel_size,
        cp=model.context_parallel_size,
        cp_levels=tuple(model.hierarchical_context_parallel_sizes or ()),
        ep=model.expert_model_parallel_size,
        etp=model.expert_tensor_parallel_size,
        pp=model.pipeline_model_parallel_size,
        folded=model.pipeline_schedule == "zb-v",
        order=PIPELINE_BEFORE_DATA_ORDER if config.distributed.use_tp_pp_dp_mapping else DEFAULT_ORDER,
        embedding_stages=_find_embedding_stages(config),
        optimizer_instances=instances,
        hybrid_cp=_count_ranks_of_longest_sequence(config),
    )


def _find_embedding_stages(config: RunConfig) -> tuple[int, ...] | None:
    """Stages that hold the word embedding's weight; None for the usual ones, its first and its last use."""
    if config.model.mtp_num_layers is None:
        return None
    shape = build_virtual_stages(config.model)
    return find_embedding_use(config.model, shape, is_tied=config.ties_embeddings).ranks


def _count_ranks_of_longest_sequence(config: RunConfig) -> int:
    """With --hybrid-context-parallel, the ranks that share the longest sequence; 0 without."""
    most_tokens, seq_length = config.model.max_seqlen_per_dp_cp_rank, config.data.seq_length
    if not config.model.hybrid_context_parallel or most_tokens is None or seq_length is None:
        return 0
    return count_ranks_of_sample(seq_length, most_tokens)


def _prepare_environment(config: RunConfig, launch: Launch) -> None:
    """Set what libraries read from the environment, the same under every launcher."""
    os.environ["LOCAL_RANK"] = str(launch.local_rank)
    shares_layers = config.model.tensor_model_parallel_size > 1 or config.model.context_parallel_size > 1
    if shares_layers and not config.ddp.use_torch_fsdp2:
        # One hardware queue: a collective starts before the matrix product that was launched after it. Collectives
        # inside of products need several.
        queues = "32" if _may_fuse_collectives(config) else "1"
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", queues)
    _configure_flight_recorder(config.distributed)
    # The setting's former name; a user's stays as it is. Memory that NCCL registers must not grow where it is.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ and not config.ddp.nccl_ub:
        # Blocks grow where they are: tensors of changing sizes leave holes between blocks, which a run that fills the
        # GPU has no room for.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if config.model.cuda_graph_impl != "none":
        # NCCL would register the buffers of recorded collectives, which it cannot in blocks that grow.
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    if config.model.deterministic_mode:
        # cuBLAS needs a workspace of fixed size, NCCL one algorithm whatever it measures.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("NCCL_ALGO", "Ring")


def _may_fuse_collectives(config: RunConfig) -> bool:
    """Return whether tensor-parallel layers may communicate inside of their products, as far as can be known before
    CUDA is touched; fused_collectives.py tries it."""
    model = config.model
    is_wanted = model.sequence_parallel and not model.deterministic_mode and model.few_bits_recipe is None
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    is_local = model.context_parallel_size == 1 and local > 0 and local % model.tensor_model_parallel_size == 0
    return is_wanted and is_local and is_new_enough() and gpus_have_links()


def _configure_flight_recorder(settings: DistributedInitConfig) -> None:
    """torch reads these when it makes the first group; older releases know the second of two names."""
    path = settings.flight_recorder_dump_path
    if path is None:
        return
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--flight-recorder-dump-path {path}: {error.strerror}; give a writable directory") from error
    size = str(settings.flight_recorder_trace_buffer_size)
    for name, value in {
        "TORCH_FR_DUMP_TEMP_FILE": path,
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": path,
        "TORCH_FR_BUFFER_SIZE": size,
        "TORCH_NCCL_TRACE_BUFFER_SIZE": size,
        "TORCH_NCCL_DUMP_ON_TIMEOUT": str(int(settings.flight_recorder_dump_on_timeout)),
        "TORCH_INCLUDE_STACK_TRACE": str(int(settings.flight_recorder_include_stack_trace)),
        "TORCH_INCLUDE_ONLY_ACTIVE": str(int(settings.flight_recorder_include_only_active)),
        "TORCH_NCCL_EXTRA_DUMP_ON_EXEC": str(int(settings.flight_recorder_extra_dump_on_exec)),
    }.items():
        os.environ.setdefault(name, value)

# SPDX-License-Identifier: Apache-2.0
"""Saving a run in upstream's formats, for programs of upstream's to load.

| --ckpt-format       | what is written                                                             |
|---------------------|-----------------------------------------------------------------------------|
| torch               | a pickled file for each model-parallel rank of this run (write_rank_files.py)   |
| upstream_torch_dist | torch's DCP with upstream's keys, for any layout (write_torch_dist.py)   |

The directories become visible as ours do, with a manifest next to upstream's files.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron.core.collectives import all_gather_object
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.crash_points import reach
from megatron.core.dist_checkpointing.manifest import FileRecord
from megatron.core.dist_checkpointing.mapping import OPTIMIZER_PREFIX
from megatron.core.errors import CheckpointError
from megatron.core.plan.read import read_plan
from megatron.core.upstream_checkpoints.flat_files import SavedFlatBuffer
from megatron.core.upstream_checkpoints.flat_layout import (
    BucketPadding,
    Parameter,
    find_bucket_size,
    sort_as_registered,
)
from megatron.core.upstream_checkpoints.flat_state import FlatOptimizerState
from megatron.core.upstream_checkpoints.model_outline import ModelOutline
from megatron.core.upstream_checkpoints.write_flat_state import FlatBufferShare, FlatRank
from megatron.core.upstream_checkpoints.write_rank_files import (
    RankTensor,
    SavedGroups,
    arrange,
    build_models,
    build_optimizer,
    name_rank_directory,
    write_rank_file,
)
from megatron.core.upstream_checkpoints.write_torch_dist import (
    UpstreamNaming,
    name_object,
    stack_tensors,
    write_upstream_dist,
    write_upstream_documents,
)
from megatron.training.checkpoint import to_upstream
from megatron.training.checkpoint.held_parameters import ParameterShare, complete, list_held
from megatron.training.checkpoint.layer_names import ask_for_sections
from megatron.training.checkpoint.run_tensors import build_sharded_model_state, build_sharded_optimizer_state
from megatron.training.checkpoint.save_directories import find_lock, say_once
from megatron.training.checkpoint.tokenizer_assets import list_tokenizer_files
from megatron.training.run import Run

MAIN_PARAM_PREFIX = f"{OPTIMIZER_PREFIX}fp32_param."


def save_torch(run: Run) -> Path:
    """Save the run as upstream's --ckpt-format torch does, and return the directory. Every rank calls this.

    Where replicas divide parameters or the optimizer's state, they gather them: the files are the same as without
    division. Raises StorageError on every rank.
    """
    groups = run.groups
    stage = groups.pp.rank() if groups.grid.pp > 1 else None
    name = name_rank_directory(groups.tp.rank(), stage, groups.ep.rank() if groups.grid.ep > 1 else None)
    # Replicas of a rank hold the same; the first of them in the job writes.
    is_writer = all_gather_object(name, groups.world).index(name) == groups.world.rank()
    chunks = _list_chunks(run, keep=is_writer)
    reach("state-gathered")

    def write(directory: Path) -> Callable[[Path], Mapping[str, FileRecord]]:
        records = write_rank_file(
            directory, name if is_writer else None, lambda: _build_content(run, chunks), groups.world
        )
        reach("tensors-written")
        return lambda _: records

    return _save_files(run, write)


def save_upstream_dist(run: Run) -> Path:
    """Save the run as upstream's --ckpt-format torch_dist does, and return the directory. Every rank calls this.

    The state of a distributed optimizer is saved in flat buckets, as it is by upstream's default, or in the shapes of
    the parameters: with --dist-ckpt-optim-fully-reshardable, and where upstream's buckets are not known to hold what
    this run has, which is noted. Raises StorageError on every rank.
    """
    settings, world = run.config.checkpoint, run.groups.world
    model = build_sharded_model_state(run)
    reach("weights-gathered")
    state = {} if settings.no_save_optim else build_sharded_optimizer_state(run)
    sharding = to_upstream.FULLY_RESHARDABLE if _is_divided(run) else None
    ranks: list[FlatRank] = []
    if not settings.no_save_optim and sharding is not None and not settings.dist_ckpt_optim_fully_reshardable:
        ranks = _build_flat_ranks(run)
    if ranks:
        sharding, state = to_upstream.DP_RESHARDABLE, {}
    elif state and sharding is not None and not to_upstream.is_mixed(run):
        # Upstream's distributed optimizer has main parameters even where they equal the model's.
        main = {f"{MAIN_PARAM_PREFIX}{name}": tensor for name, tensor in model.items() if name in _list_trained(run)}
        state = {key: dataclasses.replace(tensor, key=key) for key, tensor in main.items()} | state
    plan = read_plan(run.config.model)
    # Layers that differ are no stack, nor are letters; a list says of each layer what it is, also of equal ones.
    model_config = run.config.model
    lists = (model_config.hybrid_layer_pattern, model_config.heterogeneous_layers_config_encoded_json)
    is_list = model_config.moe_layer_freq not in (None, 1) or any(each is not None for each in lists)
    is_stacked = not is_list and len({layer.kinds for layer in plan.decoder}) == 1
    naming = UpstreamNaming(plan, is_stacked, run.config.joins_norms, run.config.model.gated_linear_unit)
    tensors = stack_tensors(ask_for_sections(run.config.model, model | state), naming)
    for rank in ranks:
        tensors |= rank.build_tensors()
    shapes = {name: tensor.global_shape for name, tensor in model.items()}
    objects = dict.fromkeys(naming.list_extra_states(shapes)) | _build_objects(run, sharding)
    for rank, beside in zip(ranks, to_upstream.build_divided_optimizers(run) if ranks else (), strict=False):
        objects |= rank.build_objects(beside)
    attachments = list_tokenizer_files(run.config.tokenizer) if settings.save_tokenizer_assets else {}
    reach("state-gathered")

    def write(directory: Path) -> Callable[[Path], Mapping[str, FileRecord]]:
        records = write_upstream_dist(directory, tensors, objects, world)
        reach("tensors-written")
        common = objects.get(name_object("common_state", [])) if run.has_common_file else None
        return lambda directory: records | write_upstream_documents(directory, attachments, common)

    return _save_files(run, write)


def _save_files(run: Run, write: Callable[[Path], Callable[[Path], Mapping[str, FileRecord]]]) -> Path:
    assert run.config.checkpoint.save is not None
    root = Path(run.config.checkpoint.save)
    lock = find_lock(run.save_locks, root)
    return serialization.save_files(write, root, run.progress.iteration, group=run.groups.world, lock=lock)


# ---- upstream's torch_dist


def _is_divided(run: Run) -> bool:
    """Return whether upstream's run with these settings has its distributed optimizer."""
    return run.config.ddp.use_distributed_optimizer and not run.config.ddp.use_torch_fsdp2


def _list_trained(run: Run) -> set[str]:
    return set(run.optimizer.param_keys())


def _build_objects(run: Run, sharding: str | None) -> dict[str, Any]:
    """Return what upstream keeps as objects, by key, as far as this rank has it."""
    groups, settings = run.groups, run.config.checkpoint
    grid, rank = groups.grid, groups.world.rank()
    objects: dict[str, Any] = {
        name_object("rerun_state_machine_state", [(rank, groups.world.size())]): to_upstream.build_rank_rerun_state()
    }
    if not settings.no_save_rng:
        place = [(groups.pp.rank(), grid.pp), (groups.tp.rank(), grid.tp)]
        # With experts on several ranks each replica has separate generators.
        place += [(groups.dp.rank(), grid.dp)] if grid.ep > 1 else []
        objects[name_object("rng_state", place)] = to_upstream.build_rng_state()
    if rank == 0:
        common = to_upstream.build_common(run)
        if not settings.no_save_optim:
            common["optimizer"] = to_upstream.build_common_optimizer(run, sharding)
        common["rerun_state_machine"] = to_upstream.build_rerun_state(run.progress.iteration)
        common["content_metadata"] = to_upstream.build_content_metadata(sharding)
        objects[name_object("common_state", [])] = common
    return objects


# ---- flat buckets of upstream's distributed optimizer


class _FlatPlan(NamedTuple):
    """The flat buffers of this process, and what is to be put there."""

    ranks: list[FlatRank]
    """One for each optimizer."""
    places: list[tuple[ParameterShare, FlatBufferShare, list[Parameter]]]
    """Tensors that this process has, each with its buffer, and the parameters that it holds there: of a stack of
    experts each by itself."""


def _build_flat_ranks(run: Run) -> list[FlatRank]:
    """This process's share of the optimizer's state in upstream's flat buckets, for each optimizer; nothing, and a
    note, where the buckets of upstream's would not hold this run's state. Every rank calls this."""
    held = list(list_held(run, with_state=True))
    plan: _FlatPlan | None = None
    try:
        plan, problem = _plan_flat(run, held), None
    except CheckpointError as error:
        problem = str(error)
    ours = {} if plan is None else {rank.prefix: [buffer.sizes for buffer in rank.buffers] for rank in plan.ranks}
    shapes = {entry.placement.name: entry.placement.full_shape for entry in held}
    everyone = all_gather_object((problem, ours, shapes), run.groups.world)
    problem = next((problem for problem, _, _ in everyone if problem is not None), None)
    if plan is not None and problem is None:
        sizes = {prefix: sizes for _, theirs, _ in everyone for prefix, sizes in theirs.items()}
        shapes = {name: shape for _, _, theirs in everyone for name, shape in theirs.items()}
        found = all_gather_object(_find_misplaced(run, plan, sizes, shapes), run.groups.world)
        problem = next((problem for problem in found if problem is not None), None)
    if plan is None or problem is not None:
        what = "the optimizer's state is saved as with --dist-ckpt-optim-fully-reshardable"
        say_once(run.groups.world, f"{what}: {problem}")
        return []
    whole = complete(run, held)
    for entry, buffer, parameters in plan.places:
        shard, state = whole[entry.placement.is_expert].finish(entry)
        for kind, tensor in ({"main_param": shard} | state).items():
            for parameter in parameters:
                values = tensor if parameter.expert is None else tensor[parameter.expert]
                buffer.put(parameter, "param" if kind == "main_param" else kind, values)
    return plan.ranks


def _plan_flat(run: Run, held: list[ParameterShare]) -> _FlatPlan:
    """Raises CheckpointError where upstream's distributed optimizer has no such buffers."""
    model, groups, args = run.config.model, run.groups, _list_args(run)
    grid = groups.grid
    if model.pipeline_schedule == "zb-v":
        raise CheckpointError("--pipeline-schedule zb-v lays layers out otherwise than upstream's stages")
    elements = sum(math.prod(each.placement.local_shape) for each in held if each.is_trained)
    plan = _FlatPlan([], [])
    for of_experts in (False, True) if grid.ep > 1 else (False,):
        mine = [each for each in held if each.is_trained and (grid.ep == 1 or each.placement.is_expert == of_experts)]
        formats = {entry.shard[0].dtype for entry in mine}
        if len(formats) != 1 or {entry.chunk for entry in mine} != set(range(len(run.model))):
            raise CheckpointError("not every model chunk of each rank has parameters of one number format")
        replicas, ddp = groups.get_replicas(of_experts), run.config.ddp
        shares = replicas.size() // ddp.num_distributed_optimizer_instances
        padding = BucketPadding(shares, ddp.pad_buckets_for_high_nccl_busbw)
        buffers: list[FlatBufferShare] = []
        for number in range(len(run.model)):
            entries = [(each, _list_parameters(run, each)) for each in mine if each.chunk == number]
            ordered = sort_as_registered(
                (parameter for _, parameters in entries for parameter in parameters),
                fused=run.config.joins_norms, grouped=model.moe_grouped_gemm,
            )  # fmt: skip
            bucket_size = find_bucket_size(args, groups.pp.rank(), number, elements)
            buffers.append(FlatBufferShare(ordered, bucket_size, padding, replicas.rank() % shares))
            plan.places.extend((each, buffers[-1], parameters) for each, parameters in entries)
        ep, ep_rank, tp = (grid.ep, groups.ep.rank(), groups.expt_tp) if of_experts else (1, 0, groups.tp)
        rank = (groups.pp.rank() * ep + ep_rank) * tp.size() + tp.rank()
        prefix = FlatRank.name_prefix(rank, int(of_experts) if grid.ep > 1 else None)
        (dtype,) = formats
        grad_dtype = torch.float32 if ddp.grad_reduce_in_fp32 else dtype
        plan.ranks.append(FlatRank(prefix, buffers, (dtype, grad_dtype)))
    return plan


def _list_args(run: Run) -> dict[str, Any]:
    return vars(to_upstream.build_args(run.config, run.progress, run.recipe.padded_vocab_size))


def _list_parameters(run: Run, entry: ParameterShare) -> list[Parameter]:
    """A parameter as upstream's modules have it; of a stack of experts each."""
    placement, model = entry.placement, run.config.model
    if ModelOutline.is_expert(placement.name):
        count, *shape = placement.local_shape
        return [Parameter(placement.name, tuple(shape), expert) for expert in range(count)]
    name = placement.name
    if placement.is_copy:
        name = "embedding.copy" if entry.local_name.startswith("embedding.") else entry.local_name
    is_shared = run.config.ties_embeddings or bool(model.mtp_num_layers)
    is_alone = run.groups.grid.pp > 1 and placement.name == "embedding.word_embeddings.weight" and is_shared
    return [Parameter(name, placement.local_shape, is_alone=is_alone)]


def _find_misplaced(
    run: Run, plan: _FlatPlan, sizes: Mapping[str, list[list[int]]], shapes: Mapping[str, tuple[int, ...]]
) -> str | None:
    """Return what a reader, who knows nothing but the sizes of all ranks' buckets, would not find where this rank has
    it.

    sizes: by prefix, of each model chunk. shapes: of all parameters.
    """
    buffers: dict[int, dict[int, list[SavedFlatBuffer]]] = {}
    for prefix, chunks in sizes.items():
        number, rank = FlatRank.parse_prefix(prefix)
        buffers.setdefault(number, {})[rank] = [SavedFlatBuffer(list(buckets)) for buckets in chunks]
    try:
        state = FlatOptimizerState(buffers, shapes, _list_args(run), "upstream's layout")
        found = state.list_slots(fused=run.config.joins_norms, grouped=run.config.model.moe_grouped_gemm)
    except CheckpointError as error:
        return str(error)
    for flat in plan.ranks:
        number, rank = FlatRank.parse_prefix(flat.prefix)
        own = {(rank, *place) for place in flat.list_slots() if place[0] in shapes}
        if found is None or own != {place for place in found[number] if place[0] == rank}:
            return "upstream's layout of the buckets is not known for this model and its division over ranks"
    return None


# ---- content of a rank's file


def _build_content(run: Run, chunks: Sequence[Sequence[RankTensor]]) -> dict[str, Any]:
    settings = run.config.checkpoint
    content = to_upstream.build_common(run) | build_models(chunks)
    if not settings.no_save_optim:
        groups = SavedGroups(
            to_upstream.build_param_groups(run),
            run.optimizer.step_count,
            to_upstream.build_grad_scaler(run),
            is_mixed=to_upstream.is_mixed(run),
        )
        content["optimizer"] = build_optimizer(chunks, groups)
    if not settings.no_save_rng:
        content["rng_state"] = to_upstream.build_rng_state()
    return content


def _list_chunks(run: Run, *, keep: bool) -> list[list[RankTensor]]:
    """The parameters of this rank's model chunks with their optimizer state, whole shards, in upstream's order; empty
    without `keep`, for a process that others only need to put theirs together."""
    held = list(list_held(run, with_state=not run.config.checkpoint.no_save_optim))
    whole = complete(run, held)
    undecayed = {name: key.is_undecayed for name, key in run.optimizer.param_keys().items()}
    chunks: list[list[RankTensor]] = [[] for _ in run.model]
    plan = read_plan(run.config.model)
    for entry in held:
        placement = entry.placement
        shard, state = whole[placement.is_expert].finish(entry)
        group = to_upstream.choose_group(run, placement, is_undecayed=undecayed.get(placement.name, False))
        if keep:
            # What no optimizer updates (the bias of a router) is in no group.
            group_or_none = group if entry.is_trained else None
            chunks[entry.chunk].append(
                RankTensor(entry.local_name, shard, state, group_or_none, plan.find(placement.name))
            )
    fused, grouped = run.config.joins_norms, run.config.model.moe_grouped_gemm
    return [arrange(chunk, fused=fused, grouped=grouped) for chunk in chunks]

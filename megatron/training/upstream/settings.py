# SPDX-License-Identifier: Apache-2.0
"""Arguments and globals as upstream's scripts know them. What is global is kept by CurrentRun, as for get_args()."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.device import get_rng_state, set_rng_state
from megatron.core.taken_arguments import take_arguments
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.timers import Timers
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.upstream import batches
from megatron.planner.memory import describe_memory, estimate_memory
from megatron.training.arguments import (
    as_namespace,
    core_transformer_config_from_args,
    make_run_config,
    refuse_missing_features,
    update_args,
)
from megatron.training.config.container import RunConfig
from megatron.training.current_run import CurrentRun
from megatron.training.data.samples import build_batch_size_calculator, count_iterations, count_needed_samples
from megatron.training.flags.parser import drop_unknown
from megatron.training.global_vars import get_args
from megatron.training.launch.initialize import initialize, read_command_line
from megatron.training.recipes.gpt import describe_gpt_workload
from megatron.training.recipes.gpt_data import read_blends
from megatron.training.recipes.vocabulary import build_tokenizer, compute_padded_vocab_size


def parse_and_validate_args(
    extra_args_provider: Any = None, ignore_unknown_args: bool = False, args_defaults: Mapping[str, Any] | None = None
) -> Namespace:
    """The settings of the command line as get_args() then returns them. args_defaults: setting -> value for what the
    command line leaves out. ignore_unknown_args: ignore unknown flags. Raises ConfigError with every problem; what only
    our loop needs, such as --lr, may be missing."""
    words = drop_unknown(sys.argv[1:], extra_args_provider) if ignore_unknown_args else None
    args = as_namespace(read_command_line(extra_args_provider, args_defaults or {}, trains=False, words=words))
    set_global_variables(args, build_tokenizer=args.tokenizer_type is not None)
    return args


def validate_args(args: Namespace, defaults: Mapping[str, Any] | None = None) -> Namespace:
    """Check arguments that a script has changed since they were parsed, and derive what follows from them; defaults:
    for those that are None. args.world_size is the number of processes. Raises ConfigError with every problem."""
    for name, value in (defaults or {}).items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    refuse_missing_features(args)
    update_args(args, make_run_config(args, checked=True))
    return args


def gpt_config_from_args(
    args: Namespace, config: TransformerConfig | None = None, model_config_cls: type[TransformerConfig] | None = None
) -> TransformerConfig:
    """The layers' configuration; `config` itself where one is given."""
    return config or core_transformer_config_from_args(args, model_config_cls or TransformerConfig)


def pretrain_cfg_container_from_args(args: Namespace, model_cfg: TransformerConfig | None = None) -> RunConfig:
    """All settings in groups; pretrain(run_config=...) takes them. model_cfg: in place of the parsed model."""
    config = make_run_config(args)
    return config if model_cfg is None else config.with_groups(model=model_cfg)


def core_transformer_config_from_yaml(args: Namespace, transfomer_key: str = "language_model") -> TransformerConfig:
    """The layers' configuration from the part of a settings file that is about them; its names are the fields'."""
    return core_transformer_config_from_args(getattr(args, transfomer_key))


def set_args(args: Namespace) -> None:
    """Set what get_args() returns from now on."""
    CurrentRun.show(args=args, config=getattr(args, "run_config", None))


def set_global_variables(args: Namespace, build_tokenizer: bool = True) -> None:
    """Arguments, timers, the number of microbatches, and unless told otherwise the tokenizer."""
    set_args(args)
    CurrentRun.show(timers=Timers(log_level=args.timing_log_level))
    calculator = build_batch_size_calculator(make_run_config(args))
    # get_num_microbatches() has no arguments, so it needs both here.
    batches.CurrentBatchSize.calculator, batches.CurrentBatchSize.consumed_samples = calculator, 0
    if build_tokenizer:
        _build_tokenizer(args)


def unset_global_variables() -> None:
    """Forget arguments, tokenizer, timers and the number of microbatches."""
    CurrentRun.forget()
    batches.destroy_num_microbatches_calculator()


def _build_tokenizer(args: Namespace) -> Tokenizer:
    """The run's tokenizer, which get_tokenizer() then returns; args.padded_vocab_size follows from it."""
    config = make_run_config(args)
    tokenizer = build_tokenizer(config)
    args.padded_vocab_size = compute_padded_vocab_size(config, tokenizer)
    update_args(args, make_run_config(args))
    CurrentRun.show(tokenizer=tokenizer)
    return tokenizer


@take_arguments(
    "allow_no_cuda=... skip_mpu_initialization get_embedding_ranks=None get_position_embedding_ranks=None store=None "
    "skip_model_parallel_init seed_pp_group=None seed_dp_group=None seed_tp_group=None seed_ep_group=None "
    "seed_etp_group=None skip_random_seed",
    "groups and their ranks are those of get_args(), and a computer without a GPU is always allowed",
)
def initialize_megatron(
    skip_mpu_initialization: bool = False, skip_model_parallel_init: bool = False, skip_random_seed: bool = False
) -> Callable[[], None] | None:
    """Join the job, make the process groups and seed, as the arguments of get_args() say.

    skip_mpu_initialization, skip_model_parallel_init: do nothing now, and return the function that does it.
    skip_random_seed: leave random numbers as they are.
    """

    def join() -> None:
        args = get_args()
        states = (get_rng_state(), get_cuda_rng_tracker().get_states())
        process = initialize(make_run_config(args))
        if skip_random_seed:
            set_rng_state(states[0])
            get_cuda_rng_tracker().set_states(states[1])
        if process.launch.rank == 0:
            for note in process.notes:
                print(f"note: {note}", flush=True)
        args.rank, args.local_rank = process.launch.rank, process.launch.local_rank

    if skip_mpu_initialization or skip_model_parallel_init:
        return join
    join()
    return None


def print_rank_last(message: object) -> None:
    """Print on the last rank only."""
    if is_last_rank():
        print(message, flush=True)


def is_last_rank() -> bool:
    """Return whether this is the last process of the job."""
    # One process is the first and the last.
    return not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1


def is_first_or_last_pipeline_stage(vp_stage: int | None = None) -> bool:
    """Return whether this process holds the first or the last layers; with a chunk, whether that chunk does."""
    chunks = get_args().virtual_pipeline_model_parallel_size
    return parallel_state.is_pipeline_first_stage(False, vp_stage) or parallel_state.is_pipeline_last_stage(
        False, vp_stage, chunks
    )


def is_hybrid_model(args: Namespace) -> bool:
    """Return True for a hybrid, whose layers --hybrid-layer-pattern names."""
    return getattr(args, "hybrid_layer_pattern", None) is not None


def get_blend_and_blend_per_split(args: Namespace) -> tuple[Any, Any]:
    """Return (datasets and weights that are split, or None; each split's, or None), from the files that hold them."""
    return read_blends(args.run_config.data)


def get_train_valid_test_num_samples() -> tuple[int, int | None, int]:
    """Samples of the whole run; None: all there are."""
    return count_needed_samples(get_args().run_config)


def update_train_iters(args: Namespace) -> None:
    """Set args.train_iters where the run's length was given in samples."""
    if not args.train_iters:
        args.train_iters = count_iterations(args.run_config, build_batch_size_calculator(args.run_config))


def report_theoretical_memory(args: Namespace, num_microbatches: int | None = None, verbose: bool = False) -> None:
    """Print what a process of this layout holds, by formula. verbose: all lines are printed anyway."""
    config: RunConfig = args.run_config
    workload = describe_gpt_workload(config, args.padded_vocab_size or args.vocab_size, num_microbatches or 1)
    print(describe_memory(estimate_memory(config.model, config.ddp, workload), config.model))

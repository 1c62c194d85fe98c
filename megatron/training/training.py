# SPDX-License-Identifier: Apache-2.0
"""run_recipe(): a training program once it has settings and a recipe. pretrain(): the same by upstream's arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron.core.enums import ModelType
from megatron.core.errors import ConfigError, MemoryShortageError, TemporaryError, say
from megatron.core.optimizer.megatron_optimizer import MegatronOptimizer
from megatron.core.taken_arguments import take_arguments
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.transformer.execution.cuda_graphs import forget_recordings
from megatron.training.checkpoint.foreign_files import save_foreign
from megatron.training.checkpoint.save import convert_checkpoint
from megatron.training.config.container import RunConfig
from megatron.training.current_run import CurrentRun
from megatron.training.data.loading import explain_lost_loader
from megatron.training.flags.parser import ExtraFlags
from megatron.training.hooks.in_process import train_again_and_again
from megatron.training.launch.initialize import (
    Process,
    explain_lost_peer,
    explain_nondeterminism,
    initialize,
    read_command_line,
    shut_down,
)
from megatron.training.launch.memory_limits import explain_memory_shortage
from megatron.training.launch.preflight import check_before_training
from megatron.training.launch.seat import Seat
from megatron.training.loop import train
from megatron.training.recipes.build import wrap_providers
from megatron.training.recipes.recipe import Recipe
from megatron.training.run import Hook, Run
from megatron.training.setup import build_run, describe_machine, setup

# Put here by a table of upstream's names; declared for type checkers.
evaluate_and_print_results: Any
get_model: Any
setup_model_and_optimizer: Any
train_step: Any
training_log: Any
update_train_iters: Any


def _take_container(function: Callable[..., Run]) -> Callable[..., Run]:
    """Let pretrain() also be called as upstream's newest release is: with a container of settings, which is a RunConfig
    here, before the datasets, and a model provider, if any, after the forward step."""
    newest = take_arguments(
        "run_config train_valid_test_dataset_provider model_type forward_step_func model_provider "
        "process_non_loss_data_func get_embedding_ranks get_position_embedding_ranks non_loss_data_func store=None "
        "inprocess_call_wrapper=None p2p_communicator=None pg_collection=None skip_model_parallel_init=False",
        "a run joins its job and makes its groups itself",
    )(lambda **given: function(**{"model_provider": None, **given}))

    @functools.wraps(function)
    def call(*args: Any, **given: Any) -> Run:
        if "cfg_container" in given:
            given["run_config"] = given.pop("cfg_container")
            return newest(*args, **given)
        return (newest if args and isinstance(args[0], RunConfig) else function)(*args, **given)

    return call


@_take_container
def pretrain(
    train_valid_test_dataset_provider: Callable[[tuple[int, int | None, int]], Sequence[Any]],
    model_provider: Callable[..., Any] | None,
    model_type: ModelType,
    forward_step_func: Callable[..., Any],
    process_non_loss_data_func: Callable[..., Any] | None = None,
    extra_args_provider: ExtraFlags | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    get_embedding_ranks: None = None,
    get_position_embedding_ranks: None = None,
    non_loss_data_func: Callable[[Any], Any] | None = None,
    *,
    run_config: RunConfig | None = None,
    tokenizer: Tokenizer | None = None,
    optimizer_provider: Callable[..., MegatronOptimizer] | None = None,
    scheduler_provider: Callable[..., Any] | None = None,
    hooks: Sequence[Hook] = (),
) -> Run:
    """Train the model of a script that is written against upstream; returns the finished run. See `run_recipe`.

    train_valid_test_dataset_provider: (training, validation, test) samples -> three datasets, or None for some; see
    docs/data.md.
    model_provider: (pre_process, post_process) and, where it accepts them, vp_stage and pg_collection -> one chunk; the
    model of the settings when None.
    forward_step_func: (batches, model) -> (output, loss function).
    run_config: the settings; read from the command line when None, with the flags that `extra_args_provider` adds to
    the parser it is given, and `args_defaults` (setting -> value) for what the command line leaves out.
    process_non_loss_data_func: (data, iteration, TensorBoard writer), called on the first rank after each evaluation,
    with --tensorboard-dir. The data come from non_loss_data_func(model chunks), or else are what the loss function
    returns when it is called with non_loss_data=True, for each microbatch of a global batch.
    get_embedding_ranks, get_position_embedding_ranks: of upstream's signature; the layout says which ranks these are.
    tokenizer: built from the settings when None.
    optimizer_provider: (run_config, model chunks, process groups) -> optimizer, and scheduler_provider: (run_config,
    optimizer) -> scheduler; as the flags say when None; see docs/optimizers.md.
    hooks: yours, in addition to the flags'; see docs/logging.md.

    Inside, the functions above may call get_args(), get_tokenizer() and get_timers().

    Raises MegatronError for whatever the user can mend.
    """
    # Accepted as parameters because upstream's callers pass them by position; refused when they are used.
    if get_embedding_ranks is not None or get_position_embedding_ranks is not None:
        raise ConfigError("pretrain() has no use for get_embedding_ranks: the layout says it; leave them out")
    if model_type is not ModelType.encoder_or_decoder:
        raise ConfigError(f"pretrain() trains ModelType.encoder_or_decoder only; found {model_type}")
    if run_config is None:
        run_config = read_command_line(extra_args_provider, args_defaults or {})

    recipe = wrap_providers(
        run_config,
        tokenizer,
        build_model=model_provider,
        build_datasets=train_valid_test_dataset_provider,
        forward_step=forward_step_func,
        process_non_loss_data=process_non_loss_data_func,
        collect_non_loss_data=non_loss_data_func,
        build_optimizer=optimizer_provider,
        build_scheduler=scheduler_provider,
    )
    return run_recipe(run_config, recipe, hooks)


def run_recipe(config: RunConfig, recipe: Recipe, hooks: Sequence[Hook] = ()) -> Run:
    """Join the job, set up, train, and leave in order; returns the finished run.

    hooks: yours, in addition to the settings'; see docs/logging.md. Inside, the recipe's functions may call
    get_args(), get_tokenizer() and get_timers(). Raises MegatronError for whatever the user can mend, and
    KeyboardInterrupt after a run that Ctrl-C has ended in order.
    """
    if config.profiling.dry_run:
        from megatron.training.launch.dry_run import dry_run

        # Like --print-config: the answer is the program's, and there is no run to return.
        try:
            raise SystemExit(dry_run(config, recipe, _build_shown))
        finally:
            CurrentRun.forget()
    try:
        if config.in_process.inprocess_restart:
            return train_again_and_again(
                config, lambda seat, hook: _set_up_and_train(config, recipe, [*hooks, hook], seat)
            )
        return _set_up_and_train(config, recipe, hooks)
    except (MemoryError, RuntimeError) as error:
        shortage = explain_memory_shortage(error, config, recipe.workload)
        if shortage is None:
            raise
        raise MemoryShortageError(shortage) from error


def _build_shown(config: RunConfig, process: Process, recipe: Recipe, hooks: Sequence[Hook]) -> Run:
    """The parts of a run of which the recipe's functions may ask get_args(), get_tokenizer() and get_timers()."""
    additions = {"padded_vocab_size": recipe.padded_vocab_size, "rank": process.launch.rank, "local_rank": 0}
    CurrentRun.show(config=config, additions=additions, tokenizer=recipe.tokenizer)
    run = build_run(config, process, recipe, hooks)
    CurrentRun.show(timers=run.timers)
    return run


def _set_up_and_train(config: RunConfig, recipe: Recipe, hooks: Sequence[Hook], seat: Seat | None = None) -> Run:
    try:
        process = initialize(config, seat)
    except RuntimeError as error:
        # The store at which all meet may go with the first rank, before anybody knows who else is there.
        problem = explain_lost_peer(error)
        if problem is None:
            raise
        raise TemporaryError(problem) from error
    # Where the job may begin again, all meet after a failure and see who is lost.
    presence = process.presence if seat is None else None
    if process.launch.rank == 0:
        notes = [f"note: {note}" for note in (*config.notes, *process.notes)]
        say("\n".join([describe_machine(process), *notes]))
    # Upstream sets these on its namespace while it starts, and scripts written for it read them there.
    additions = {
        "padded_vocab_size": recipe.padded_vocab_size,
        "rank": process.launch.rank,
        "local_rank": process.launch.local_rank,
    }
    # Before setup: the functions of a script, which setup calls, may ask for get_args().
    CurrentRun.show(config=config, additions=additions, tokenizer=recipe.tokenizer)
    try:
        run = setup(config, process, recipe, hooks)
    except RuntimeError as error:
        # Setting up has collectives, too: --save is locked and a checkpoint found on the first rank for all.
        problem = explain_lost_peer(error, presence)
        if problem is None:
            raise
        raise TemporaryError(problem) from error
    CurrentRun.show(timers=run.timers)
    try:
        if config.reliability.preflight:
            check_before_training(run, process.launch, process.groups)
        if config.checkpoint.ckpt_convert_format is None:
            train(run)
        else:
            convert_checkpoint(run)
        save_foreign(run)
    # torch reports a lost loader process, a lost peer and an operation that is not deterministic as RuntimeErrors that
    # differ by their text only.
    except RuntimeError as error:
        if (operation := explain_nondeterminism(error)) is not None:
            raise ConfigError(operation) from error
        problem = explain_lost_loader(error) or explain_lost_peer(error, presence)
        if problem is None:
            raise
        raise TemporaryError(problem) from error
    finally:
        run.hooks.on_close(run)
        run.data.close()
        # Another run in the same process (a notebook, a test) must not find the settings of this one.
        CurrentRun.forget()
    for chunk in run.model:
        forget_recordings(chunk)
    # Only after success: with a peer gone, leaving the groups in order would wait for it.
    shut_down()
    # On every rank, also where the key was not pressed: a program that was interrupted says so to its caller.
    if run.interrupted:
        raise KeyboardInterrupt(run.stop_reason)
    return run

# SPDX-License-Identifier: Apache-2.0
"""From settings to a run that is ready to step: data, model, optimizer, schedule, hooks, and a checkpoint's state."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron.core import device as device_module
from megatron.core.collectives import all_gather_object
from megatron.core.device import is_cpu
from megatron.core.device_graphs import GraphRecorder
from megatron.core.dist_checkpointing.agreement import on_first_rank
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.model_chunk import ModelChunk
from megatron.core.distributed.torch_fully_sharded_data_parallel import (
    TorchFullyShardedDataParallel,
    shards_parameters,
)
from megatron.core.errors import ConfigError, say
from megatron.core.num_microbatches_calculator import NumMicrobatchesCalculator
from megatron.core.optimizer.megatron_optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel.executor import Executor, compute_activation_shape
from megatron.core.plan.stages import build_pipeline_layout, build_virtual_stages
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.parameters import declare_vocabulary, materialise_parameters
from megatron.core.timers import Timers
from megatron.core.traffic import Traffic
from megatron.core.transformer.execution.compilation import compile_regions, find_obstacle
from megatron.core.transformer.execution.cuda_graphs import record_layers
from megatron.training.checkpoint.adapter_saves import require_base
from megatron.training.checkpoint.foreign_files import load_adapter, prepare_foreign_save
from megatron.training.checkpoint.restore import load_checkpoint
from megatron.training.checkpoint.save_directories import prepare_save, refuse_to_undo
from megatron.training.config.container import RunConfig
from megatron.training.config.relations import compute_schedule_lengths, samples_per_scheduled_iteration
from megatron.training.data.loading import SPLITS, TrainingData, build_loader_settings, check_loader_processes
from megatron.training.data.phases import find_phase
from megatron.training.data.planned_batches import build_step_plans
from megatron.training.data.samples import build_batch_size_calculator, count_iterations, count_needed_samples
from megatron.training.hooks.build import build_hooks
from megatron.training.hooks.dispatch import Hooks
from megatron.training.hooks.references import complete_references
from megatron.training.hooks.teacher_logits import write_teacher_logits
from megatron.training.launch.crash_loop import refuse_crash_loop
from megatron.training.launch.initialize import Process
from megatron.training.launch.memory_limits import refuse_oversize
from megatron.training.launch.sites import build_outer_optimizer
from megatron.training.metrics import Metrics
from megatron.training.recipes.attention_logits import AttentionLogits
from megatron.training.recipes.recipe import Recipe
from megatron.training.run import Hook, HookContext, Place, Progress, Run, ignore_peers, list_none


def setup(config: RunConfig, process: Process, recipe: Recipe, hooks: Sequence[Hook] = ()) -> Run:
    """Build everything and restore what --load holds.

    hooks: in addition to the hooks of the settings. Raises MegatronError for whatever the user can fix.
    """
    recipe.check_layout(config.model)
    check_loader_processes(config.data)
    # Groups that count must be in place before anything is built: modules keep the groups that they are handed.
    traffic = Traffic()
    process = meter_groups(config, process, traffic, recipe)
    # Before anything that takes long: a --save that cannot be written, or that another run writes to.
    save_locks = prepare_save(config.checkpoint, process.groups.world)
    place = Place(socket.gethostname(), process.launch.local_rank, process.launch.job)
    try:
        if config.checkpoint.save is not None:
            on_first_rank(process.groups.world, lambda: refuse_crash_loop(config))
        prepare_foreign_save(config, recipe, process.groups.world)
        run = build_run(
            config, process, recipe, [*build_hooks(config, HookContext(recipe, traffic, process.watch, place)), *hooks]
        )
        run.save_locks = save_locks
        # Last, because it writes into the memory of everything in the run: weights, optimizer, schedule, progress,
        # hooks.
        load_checkpoint(run)
        load_adapter(run)
        require_base(run)
        refuse_to_undo(config, process.groups.world, run.progress)
        if config.training.phase_transitions:
            build_phase_data(run)
        # A checkpoint says which sizes are passed already.
        check_batch_sizes(run)
        complete_references(run)
        write_teacher_logits(run)
    except BaseException:
        for lock in save_locks:
            lock.release()
        raise
    if config.validation.skip_train:
        run.progress.end_here()
    # Memory that setting up has used and freed would stay cached, in sizes that the steps do not need.
    device_module.release_cached_memory()
    return run


def build_run(config: RunConfig, process: Process, recipe: Recipe, hooks: Sequence[Hook]) -> Run:
    """Build the parts of a run that starts from the beginning: data, model, optimizer, schedule."""
    groups, device = process.groups, process.device
    batch_size = build_batch_size_calculator(config)
    progress = Progress(count_iterations(config, batch_size))
    # Data comes before the model: an unreadable dataset is then reported before minutes are spent on weights.
    # But for phases of it: which one it is, only the checkpoint says.
    datasets: Sequence[Any] = [None] * len(SPLITS)
    if not config.training.phase_transitions:
        datasets = recipe.build_datasets(count_needed_samples(config))
    if process.launch.rank == 0:
        print_summaries(datasets)
    settings = build_loader_settings(config, groups, device, batch_size, recipe.padded_vocab_size)
    plans = build_step_plans(config, groups, datasets[0], settings, batch_size)
    model = build_model(config, process, recipe)
    timers = build_timers(config, process)
    if recipe.build_optimizer is None:
        optimizer = get_megatron_optimizer(config.optimizer, model, pg_collection=groups)
    else:
        optimizer = recipe.build_optimizer(config, model, groups)
    # After either builder, so that a user's optimizer is timed, too.
    optimizer.use_timers(timers)
    if config.training.dump_param_to_param_group_map is not None:
        write_param_group_map(config.training.dump_param_to_param_group_map, optimizer, groups)
    outer = build_outer_optimizer(config, process.launch, optimizer, process.meeting_point)
    executor = build_executor(config, process, model, batch_size, optimizer)
    run = Run(
        config=config,
        groups=groups,
        device=device,
        recipe=recipe,
        model=model,
        optimizer=optimizer,
        scheduler=(recipe.build_scheduler or build_scheduler)(config, optimizer),
        executor=executor,
        # A program depends only on the number of microbatches, of which a run has few.
        schedule=functools.cache(functools.partial(executor.pipeline.program, groups.pp.rank())),
        evaluation_schedule=functools.cache(
            functools.partial(executor.pipeline.program, groups.pp.rank(), forward_only=True)
        ),
        batch_size=batch_size,
        data=TrainingData(
            dict(zip(SPLITS, datasets, strict=True)), settings, planned=None if plans is None else plans.batches
        ),
        outer=outer,
        plans=plans,
        progress=progress,
        hooks=Hooks(hooks),
        metrics=Metrics(config.logger.log_interval),
        timers=timers,
        list_ended_ranks=list_none if process.presence is None else process.presence.list_ended,
        leave_groups=ignore_peers if process.connections is None else process.connections.cut,
        flops_per_token=recipe.count_flops_per_token([chunk.module for chunk in model]),
        evaluation_shape=compute_microbatch_shape(
            config, groups, config.validation.eval_micro_batch_size or batch_size.micro_batch_size
        ),
    )
    # Clipping belongs inside the optimizer's step: after each update, before the network gets its parameters.
    if config.model.measures_attention_logits:
        optimizer.call_after_update(AttentionLogits(config.model, model, optimizer, groups))
    return run


def build_phase_data(run: Run) -> None:
    """--phase-transition-iterations: build the data of the phase that the run's progress is in."""
    config, progress = run.config, run.progress
    consumed, size = progress.consumed_train_samples, run.batch_size.running_global_batch_size(0)
    transitions = config.training.phase_transitions
    phase = find_phase(transitions, progress.iteration, progress.target_iterations, consumed, size)
    train, *others = count_needed_samples(config)
    datasets = run.recipe.build_datasets((min(train, phase.samples), *others))
    if run.is_first_rank:
        print_summaries(datasets)
    run.data.datasets, run.data.first_sample = dict(zip(SPLITS, datasets, strict=True)), phase.first_sample


def print_summaries(datasets: Sequence[Any]) -> None:
    """Print what the datasets have to say about themselves: a line of each that has a method `summary`."""
    for dataset in [part for entry in datasets for part in (entry if isinstance(entry, list) else [entry])]:
        # A blend speaks through the datasets it draws from.
        for part in getattr(dataset, "datasets", [dataset]):
            summary = getattr(part, "summary", None)
            if summary is not None:
                say(summary())


def build_model(config: RunConfig, process: Process, recipe: Recipe) -> list[ModelChunk]:
    """This rank's pipeline chunks on its device, compiled if asked for, in flat buffers."""
    switch_compiler_off_where_it_fails(config, process.device)
    groups = process.groups
    shape = build_virtual_stages(config.model)
    layout = build_pipeline_layout(config.model, shape)
    modules: list[nn.Module] = []
    for index in range(shape.chunks):
        content = layout[shape.index(groups.pp.rank(), index)]
        # A script's model_provider may have upstream's older signature, without these two.
        offered = {"vp_stage": index if shape.chunks > 1 else None, "pg_collection": groups}
        # What a script's model allocates lands on this process's device; parameters on the meta device
        # (--init-model-with-meta-device) get their memory from `fill` below.
        with torch.device(process.device):
            module = recipe.build_model(
                pre_process=content.has_embedding,
                post_process=content.has_loss,
                **_select_accepted(recipe.build_model, offered),
            )
        declare_vocabulary(module, recipe.vocab_size)
        if config.model.compile:
            compile_regions(module)
        if config.model.cuda_graph_impl != "none":
            record_layers(module, GraphRecorder())
        modules.append(module)
    # Before memory is given to the parameters: a tied weight must become one parameter, not two of equal values.
    tie_chunks(modules)
    # A dry run takes no memory, and its devices are elsewhere.
    if not config.profiling.dry_run:
        refuse_oversize(
            config, modules, groups.world, recipe.workload, own_optimizer=recipe.build_optimizer is not None
        )
    fill = functools.partial(
        materialise_parameters, seed=config.model.seed, device=process.device,
        draw_on_cpu=config.model.use_cpu_initialization, draw=config.model.perform_initialization,
    )  # fmt: skip
    # FSDP2 fills its modules itself, slice by slice: filling the whole model first would need the memory that it saves.
    if shards_parameters(config.ddp, groups):
        return [
            TorchFullyShardedDataParallel(config.model, config.ddp, module, pg_collection=groups, fill=fill)
            for module in modules
        ]
    for module in modules:
        fill(module)
    return [DistributedDataParallel(config.model, config.ddp, module, pg_collection=groups) for module in modules]


def switch_compiler_off_where_it_fails(config: RunConfig, device: torch.device) -> None:
    """--compile becomes a note, and the model is built in its fused forms, where torch.compile generates no code."""
    obstacle = find_obstacle(device) if config.model.compile else None
    if obstacle is not None:
        needed = "a C++ compiler such as g++" if is_cpu(device) else "the package triton and a C compiler"
        say(f"note: --compile has no effect: torch.compile does not work here ({obstacle}); it needs {needed}")
        config.model.compile = False


def _select_accepted(function: Callable[..., Any], offered: dict[str, Any]) -> dict[str, Any]:
    """Select the arguments that the function has a name for. Raises ConfigError where it must have one."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return offered
    # Without it every chunk would be the same piece of the model, and nothing else would notice.
    if offered["vp_stage"] is not None and "vp_stage" not in parameters:
        raise ConfigError(
            "several chunks of layers per pipeline stage need a model_provider with the parameter vp_stage; "
            "add it, and hand it on to the model"
        )
    return {name: value for name, value in offered.items() if name in parameters}


def tie_chunks(modules: Sequence[nn.Module]) -> None:
    """Share the embedding's weight with another use of it in a later chunk of this process (the tied output layer,
    multi-token prediction)."""
    for module in modules:
        owner = getattr(module, "embedding_owner_chunk", None)
        if owner is not None:
            module.share_embedding_of(modules[owner])  # type: ignore[operator]


def build_executor(
    config: RunConfig,
    process: Process,
    model: Sequence[nn.Module],
    batch_size: NumMicrobatchesCalculator,
    optimizer: MegatronOptimizer,
) -> Executor:
    """Return what runs the chunks."""
    shape = compute_microbatch_shape(config, process.groups, batch_size.micro_batch_size)
    return Executor(
        model, process.groups, config.model, activation_shape=shape, grad_scale_func=optimizer.grad_scale_func
    )


def compute_microbatch_shape(
    config: RunConfig, groups: ProcessGroupCollection, micro_batch_size: int
) -> tuple[int, int, int]:
    """Compute the shape of the hidden states of a microbatch between stages; packed samples are one sequence."""
    length = config.data.seq_length or 1
    sequences = (length * micro_batch_size, 1) if config.packs_samples else (length, micro_batch_size)
    return compute_activation_shape(config.model, groups, *sequences)


def check_batch_sizes(run: Run) -> None:
    """Raise ConfigError where a batch size that is still to come cannot be shared, or does not fill the pipeline.

    All of them are tried before the first step: a run should not end after days because the batch has grown.
    """
    sizes, progress = run.batch_size, run.progress
    # At least one, so that the size in force is always looked at.
    to_come = progress.consumed_train_samples, max(1, progress.target_iterations - progress.iteration)
    sizes.check_sizes(*to_come)
    for size in sorted({stretch.global_batch_size for stretch in sizes.stretches(*to_come)}):
        problem = run.executor.pipeline.problem(size // sizes.samples_per_microbatch)
        if problem is not None:
            raise ConfigError(f"--global-batch-size {size}: {problem}")


def write_param_group_map(path: str, optimizer: MegatronOptimizer, groups: ProcessGroupCollection) -> None:
    """--dump-param-to-param-group-map: which optimizer group each parameter of the whole model is in, as a JSON object.

    Every rank calls this. Groups are numbered over the whole model: decayed parameters first, then by learning rate and
    update rule. Raises ConfigError on every rank where the file cannot be written.
    """
    # Only stages hold different parameters; tensor- and data-parallel ranks know the same names.
    by_stage = all_gather_object(optimizer.param_keys(), groups.pp)
    keys = {name: key for found in by_stage for name, key in found.items()}
    # Sorted by content, not by arrival: the same run gives the same numbers under every pipeline layout.
    numbers = {key: number for number, key in enumerate(sorted(set(keys.values())))}
    text = json.dumps({name: numbers[key] for name, key in keys.items()}, indent=2) + "\n"

    def write() -> None:
        try:
            Path(path).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"--dump-param-to-param-group-map {path} cannot be written ({error.strerror}); give another file"
            ) from error

    on_first_rank(groups.world, write)


def build_scheduler(config: RunConfig, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Build what sets learning rate and weight decay, by the number of samples consumed."""
    scheduler = config.scheduler
    # The schedule counts samples, whatever unit the flags use.
    steps = compute_schedule_lengths(config)
    weight_decay = config.optimizer.weight_decay
    start_wd, end_wd = scheduler.start_weight_decay, scheduler.end_weight_decay
    return OptimizerParamScheduler(
        optimizer,
        init_lr=scheduler.lr_warmup_init,
        max_lr=config.optimizer.lr or 0.0,
        min_lr=config.optimizer.min_lr,
        lr_warmup_steps=steps.lr_warmup_steps,
        lr_decay_steps=steps.lr_decay_steps,
        lr_decay_style=scheduler.lr_decay_style,
        start_wd=weight_decay if start_wd is None else start_wd,
        end_wd=weight_decay if end_wd is None else end_wd,
        wd_incr_steps=steps.wd_incr_steps,
        wd_incr_style=scheduler.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=scheduler.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=scheduler.override_opt_param_scheduler,
        wsd_decay_steps=steps.wsd_decay_steps,
        lr_wsd_decay_style=scheduler.lr_wsd_decay_style,
        samples_per_iteration=None if config.training.train_iters is None else samples_per_scheduled_iteration(config),
    )


def build_timers(config: RunConfig, process: Process) -> Timers:
    """The stopwatches that --timing-log-level asks for; they wait for the device, and for each other if asked to."""
    logger = config.logger
    # Without the barrier a rank's timer would also hold the time it waits for slower ranks.
    waits = logger.timing_log_level > 0 and logger.barrier_with_L1_time
    return Timers(logger.timing_log_level, synchronizes=True, barrier_group=process.groups.world if waits else None)


def meter_groups(config: RunConfig, process: Process, traffic: Traffic, recipe: Recipe) -> Process:
    """The process with groups that tell of their calls where somebody listens: the log, or the watch for hangs. Raises
    ConfigError for a model that is not handed its groups where all must be counted."""
    counts, watch = config.logger.log_comm_volume, process.watch
    # A model that fetches its groups from elsewhere would communicate uncounted, and the report would be wrong rather
    # than missing.
    parameters = inspect.signature(recipe.build_model).parameters
    if counts and "pg_collection" not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        raise ConfigError(
            "--log-comm-volume counts in the process groups that the model is handed: give model_provider the "
            "parameter pg_collection, and hand it on to the model"
        )
    inner = traffic if counts else None
    if watch is not None:
        return dataclasses.replace(
            process, groups=process.groups.metered(functools.partial(watch.build_meter, inner=inner))
        )
    if inner is not None:
        return dataclasses.replace(process, groups=process.groups.metered(lambda group, axis: traffic))
    return process


def describe_machine(process: Process) -> str:
    """The first line of the log: software, device, processes."""
    world = process.groups.world.size()
    return f"torch {torch.__version__}, {device_module.device_name()}, {world} process{'es' if world > 1 else ''}"

"""Which hooks a run has, from its settings."""

from __future__ import annotations

import time

from megatron.core.traffic import Traffic
from megatron.training.config.container import RunConfig
from megatron.training.hooks.attention_logits import AttentionLogitsHook
from megatron.training.hooks.balance import BalanceHook
from megatron.training.hooks.checkpoint import CheckpointHook
from megatron.training.hooks.collective_timeout import CollectiveTimeoutHook
from megatron.training.hooks.console import ConsoleHook
from megatron.training.hooks.evaluation import EvaluationHook
from megatron.training.hooks.exit_conditions import ExitConditionsHook, ExitSignalHook
from megatron.training.hooks.experts import ExpertsHook
from megatron.training.hooks.garbage_collection import GarbageCollectionHook
from megatron.training.hooks.layer_norms import LayerNormsHook
from megatron.training.hooks.memory import MemoryHook
from megatron.training.hooks.meter import MeterHook
from megatron.training.hooks.metrics import MetricsHook
from megatron.training.hooks.named_ranges import NamedRangesHook
from megatron.training.hooks.non_loss_data import NonLossDataHook
from megatron.training.hooks.outliers import OutlierHook
from megatron.training.hooks.pipeline_clock import PipelineClockHook
from megatron.training.hooks.profiler import MemoryHistoryHook, ProfilerHook
from megatron.training.hooks.progress_history import ProgressHistoryHook
from megatron.training.hooks.sanity import SanityHook
from megatron.training.hooks.tensorboard import TensorBoardHook
from megatron.training.hooks.timing import TimingHook
from megatron.training.hooks.traffic import TrafficHook
from megatron.training.hooks.wandb import WandbHook
from megatron.training.recipes.recipe import Recipe
from megatron.training.run import Hook

PROGRAM_STARTED_AT = time.monotonic()


def build_hooks(config: RunConfig, recipe: Recipe, traffic: Traffic) -> list[Hook]:
    """Everything periodic, in the order of one iteration: measure, report, check, evaluate, decide, save."""
    hooks: list[Hook] = reporting_hooks(config, traffic, meter := MeterHook())
    spiky, large = config.training.check_for_spiky_loss, config.training.check_for_large_grads
    if spiky or large:
        hooks.append(OutlierHook(meter, losses=spiky, gradients=large))
    if config.ddp.check_for_nan_in_grad:
        hooks.append(SanityHook(meter))
    if config.distributed.distributed_timeout_seconds_after_init is not None:
        hooks.append(CollectiveTimeoutHook(config.distributed.distributed_timeout_seconds_after_init))
    if config.training.manual_gc:
        hooks.append(GarbageCollectionHook(config.training))
    if config.profiling.record_memory_history:
        hooks.append(MemoryHistoryHook(config.profiling))
    if config.profiling.profile:
        hooks.append(ProfilerHook(config.profiling))
    if config.profiling.nvtx_ranges:
        hooks.append(NamedRangesHook())
    evaluates = config.validation.eval_interval is not None or config.validation.skip_train
    if evaluates and (config.validation.eval_iters > 0 or config.validation.full_validation):
        hooks.append(EvaluationHook(config.validation))
    if config.training.exit_interval is not None or config.training.exit_duration_in_mins is not None:
        hooks.append(ExitConditionsHook(config.training, PROGRAM_STARTED_AT))
    if config.training.exit_signal_handler:
        hooks.append(ExitSignalHook(config.training.exit_signal))
    if config.checkpoint.save is not None:
        hooks.append(CheckpointHook(config.checkpoint))
    if recipe.process_non_loss_data is not None:
        tensorboard = next((hook for hook in hooks if isinstance(hook, TensorBoardHook)), None)
        hooks.append(NonLossDataHook(recipe.process_non_loss_data, recipe.collect_non_loss_data, tensorboard))
    return hooks


def reporting_hooks(config: RunConfig, traffic: Traffic, meter: MeterHook) -> list[Hook]:
    """Measure, then print, then write curves."""
    logger = config.logger
    hooks: list[Hook] = [meter]
    if config.model.num_moe_experts is not None:
        hooks.append(ExpertsHook(meter, per_layer=config.model.moe_per_layer_logging))
    if logger.log_max_attention_logit:
        hooks.append(AttentionLogitsHook(meter))
    if logger.log_comm_volume:
        hooks.append(TrafficHook(logger.log_interval, traffic, meter))
    if config.model.hybrid_context_parallel:
        hooks.append(BalanceHook(logger.log_interval, meter))
    if logger.metrics_dir is not None:
        hooks.append(MetricsHook(logger.metrics_dir, meter))
    hooks.append(ConsoleHook(logger.log_interval, meter))
    if logger.log_layer_norms:
        hooks.append(LayerNormsHook(logger.log_interval, meter))
    if logger.timing_log_level >= 2 or config.profiling.pipeline_trace_dir is not None:
        hooks.append(PipelineClockHook(config.profiling, logger.timing_log_level))
    if logger.timing_log_level > 0:
        hooks.append(TimingHook(logger, meter))
    if logger.log_memory_interval is not None:
        hooks.append(MemoryHook(logger.log_memory_interval))
    if logger.tensorboard_dir is not None:
        hooks.append(TensorBoardHook(logger, meter))
    if logger.wandb_project is not None:
        hooks.append(WandbHook(logger, meter))
    if logger.log_progress and config.checkpoint.save is not None:
        hooks.append(ProgressHistoryHook(config.checkpoint.save))
    return hooks

# SPDX-License-Identifier: Apache-2.0
"""Choice of a run's hooks: each class says for itself whether the settings ask for it (Hook.build)."""

from __future__ import annotations

from megatron.training.config.container import RunConfig
from megatron.training.hooks.alerts import AlertsHook
from megatron.training.hooks.checkpoint import CheckpointHook
from megatron.training.hooks.clocks import NamedRangesHook, PipelineClockHook, TimingHook
from megatron.training.hooks.console import ConsoleHook
from megatron.training.hooks.crash_loop import CrashLoopHook
from megatron.training.hooks.dumps import (
    ActivationGradsDumpHook,
    ActivationsDumpHook,
    ParamsDumpHook,
    TokensPerExpertDumpHook,
    WeightGradsDumpHook,
)
from megatron.training.hooks.energy import EnergyHook
from megatron.training.hooks.evaluation import EvaluationHook, NonLossDataHook
from megatron.training.hooks.exits import ExitHook
from megatron.training.hooks.fp8_measures import FP8Hook
from megatron.training.hooks.guards import NonFiniteHook, OutlierHook
from megatron.training.hooks.hangs import HangWatchHook
from megatron.training.hooks.housekeeping import CollectiveTimeoutHook, FreeMemoryHook, GarbageCollectionHook
from megatron.training.hooks.injected_faults import InjectedFaultsHook
from megatron.training.hooks.iterations import SkipIterationsHook
from megatron.training.hooks.ledger import LedgerHook
from megatron.training.hooks.measures import (
    AttentionLogitsHook,
    BalanceHook,
    ExpertsHook,
    IndexerHook,
    LayerNormsHook,
    MemoryHook,
    PredictionHook,
    StepHook,
    TrafficHook,
    ZerosHook,
)
from megatron.training.hooks.preferences import PreferencesHook
from megatron.training.hooks.profiler import MemoryHistoryHook, ProfilerHook
from megatron.training.hooks.progress_history import ProgressHistoryHook
from megatron.training.hooks.replicas import WeightHashHook
from megatron.training.hooks.routes import RoutingReplayHook, RoutingTraceHook
from megatron.training.hooks.run_history import EventsHook, TimesHook
from megatron.training.hooks.simulated_faults import SimulatedFaultsHook
from megatron.training.hooks.sites import SitesHook
from megatron.training.hooks.sniff_test import SniffTestHook
from megatron.training.hooks.stragglers import StragglerHook
from megatron.training.hooks.validation import ValidationHook
from megatron.training.hooks.writers import MetricsFileHook, TensorBoardHook, WandbHook
from megatron.training.run import Hook, HookContext

HOOKS: tuple[type[Hook], ...] = (
    # Phase.MEASURE; values appear in the log in this order
    StepHook, PredictionHook, IndexerHook,
    ZerosHook, ExpertsHook, AttentionLogitsHook, FP8Hook, TrafficHook, BalanceHook, LayerNormsHook, EnergyHook,
    TimingHook, MemoryHook, PipelineClockHook, NamedRangesHook, ProfilerHook, MemoryHistoryHook, HangWatchHook,
    StragglerHook, TimesHook,
    # Phase.WRITE; what the log says is in the file already
    MetricsFileHook, ConsoleHook, EventsHook, AlertsHook, TensorBoardHook, WandbHook, ProgressHistoryHook, LedgerHook,
    # Phase.CONTROL
    CrashLoopHook, SimulatedFaultsHook, InjectedFaultsHook, SitesHook, PreferencesHook,
    ValidationHook, NonFiniteHook, WeightHashHook, OutlierHook, CollectiveTimeoutHook, FreeMemoryHook,
    GarbageCollectionHook, SniffTestHook,
    EvaluationHook, NonLossDataHook, SkipIterationsHook, ExitHook,
    # Phase.SAVE
    ParamsDumpHook, WeightGradsDumpHook, ActivationsDumpHook, ActivationGradsDumpHook, TokensPerExpertDumpHook,
    RoutingTraceHook, RoutingReplayHook,
    CheckpointHook,
)  # fmt: skip


def build_hooks(config: RunConfig, context: HookContext) -> list[Hook]:
    """The hooks that the settings ask for. Raises ConfigError for one that cannot be on this machine."""
    built = (kind.build(config, context) for kind in HOOKS)
    return [hook for hook in built if hook is not None]

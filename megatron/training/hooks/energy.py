# SPDX-License-Identifier: Apache-2.0
"""--log-energy: what the GPUs take from the wall while they train, by the counters of NVIDIA's management library."""

from __future__ import annotations

import time
from typing import Any

import torch

from megatron.core import device
from megatron.core.collectives import all_gather_object
from megatron.core.errors import ConfigError, report_error
from megatron.core.optional_deps import require
from megatron.training.config.container import RunConfig
from megatron.training.run import Hook, HookContext, Phase, Run, StepResult


class EnergyMeter:
    """The energy counter of one GPU. Raises ConfigError where it has none that can be read."""

    def __init__(self, gpu: torch.device) -> None:
        self._library = require("pynvml", needed_by="--log-energy")
        # By its name, because the library counts GPUs that CUDA_VISIBLE_DEVICES hides from torch.
        self._name = f"GPU-{device.identify_gpu(gpu)}"
        self._handle: Any = None
        self.read_joules()

    def read_joules(self) -> float:
        """Since the driver was loaded; counted by the GPU itself, so that nothing waits for it."""
        try:
            if self._handle is None:
                self._library.nvmlInit()
                self._handle = self._library.nvmlDeviceGetHandleByUUID(self._name)
            millijoules = self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        except self._library.NVMLError as error:
            raise ConfigError(f"--log-energy: the energy of {self._name} cannot be read ({error})") from error
        return float(millijoules) / 1000


class EnergyHook(Hook):
    """Joules of an iteration and watts, as means over the GPUs and over the iterations since the last progress line.

    Evaluation and saving are between steps and do not count. Where a GPU's counter cannot be read, training goes
    on, and the means are over the others.
    """

    phase = Phase.MEASURE
    is_collective = True

    def __init__(self, log_interval: int) -> None:
        self._log_interval = log_interval
        self._meter: EnergyMeter | None = None
        self._began = (0.0, 0.0)
        self._joules = self._seconds = 0.0
        self._steps = 0

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> EnergyHook | None:
        """Return the hook for --log-energy. Raises ConfigError without the package that reads the counters."""
        if not config.logger.log_energy:
            return None
        require("pynvml", needed_by="--log-energy")
        return cls(config.logger.log_interval)

    def on_train_start(self, run: Run) -> None:
        """Find this process's GPU."""
        try:
            self._meter = EnergyMeter(run.device)
        except ConfigError as error:
            report_error(ConfigError(f"rank {run.groups.world.rank()}: {error}; training goes on"))

    def on_step_start(self, run: Run) -> None:
        """Read the counter."""
        self._began = self._read()

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Add up the step; at the interval, gather what all ranks have taken. Every rank takes part."""
        joules, moment = self._read()
        self._joules += joules - self._began[0]
        self._seconds += moment - self._began[1]
        self._steps += 1
        if run.progress.iteration % self._log_interval:
            return
        own = None if self._meter is None else (self._joules / self._steps, self._joules / self._seconds)
        known = [found for found in all_gather_object(own, run.groups.world) if found is not None]
        self._joules, self._seconds, self._steps = 0.0, 0.0, 0
        if not known:
            return
        energy, power = (sum(values) / len(known) for values in zip(*known, strict=True))
        # Names and words are upstream's.
        run.metrics.record(
            "iter-energy/gpu", energy, reduce="last", text=lambda value: f"energy per GPU (J/iter/GPU): {value:.1f}"
        )
        run.metrics.record("power/gpu", power, reduce="last", text=lambda value: f"power per GPU (W/GPU): {value:.1f}")

    def _read(self) -> tuple[float, float]:
        """(joules, seconds) from now on useful as differences; joules are 0 without a counter."""
        moment = time.monotonic()
        if self._meter is None:
            return 0.0, moment
        try:
            return self._meter.read_joules(), moment
        except ConfigError as error:
            self._meter = None
            report_error(ConfigError(f"{error}; training goes on"))
            return 0.0, moment

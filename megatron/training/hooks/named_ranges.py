"""--nvtx-ranges: iterations and the parts of the layers have names in profiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from megatron.core.device import NamedRange
from megatron.core.placement import placement_of
from megatron.training.run import Hook, Run, StepResult

_PARTS = ("input_layernorm", "self_attention", "pre_mlp_layernorm", "mlp", "word_embeddings", "output_layer")


class NamedRangesHook(Hook):
    """Names every step, and every forward of the modules in _PARTS by their names in the whole model."""

    def __init__(self) -> None:
        self._step: NamedRange | None = None
        self._handles: list[Any] = []

    def on_train_start(self, run: Run) -> None:
        """Put a range around each module."""
        for chunk in run.model:
            for name, module in chunk.module.named_modules():
                if name.rpartition(".")[2] in _PARTS:
                    before, after = _around(_global_name(name, module))
                    self._handles.append(module.register_forward_pre_hook(before))
                    self._handles.append(module.register_forward_hook(after, always_call=True))

    def on_step_start(self, run: Run) -> None:
        """Begin the iteration's range."""
        self._step = NamedRange(f"iteration {run.progress.iteration + 1}")
        self._step.__enter__()

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """End it."""
        self._leave()

    def on_close(self, run: Run) -> None:
        """Take the ranges away, also after an error."""
        self._leave()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _leave(self) -> None:
        if self._step is not None:
            self._step.__exit__()
            self._step = None


def _around(name: str) -> tuple[Callable[..., None], Callable[..., None]]:
    """What to call before and after a forward; calls of one module may be nested in one another."""
    open_ranges: list[NamedRange] = []

    def before(*_: object) -> None:
        entered = NamedRange(name)
        entered.__enter__()
        open_ranges.append(entered)

    def after(*_: object) -> None:
        open_ranges.pop().__exit__()

    return before, after


def _global_name(name: str, module: nn.Module) -> str:
    """The module's name in the whole model, where a layer has the same number on every stage."""
    for inner, param in module.named_parameters():
        return placement_of(param, f"{name}.{inner}").name.removesuffix(f".{inner}")
    return name

# SPDX-License-Identifier: Apache-2.0
"""--progress-line rich: the run on a terminal, drawn in place by the package rich; what is printed moves above it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from megatron.core.optional_deps import require
from megatron.training.hooks.progress_bar import ProgressBar
from megatron.training.hooks.progress_lines import format_duration
from megatron.training.metrics import MetricsRow

NEEDED_BY = "--progress-line rich"
_BLOCKS = " ▁▂▃▄▅▆▇█"
_CURVE = 48


class RichView(ProgressBar):
    """A bar, the values of the last step that was read, and the curve of the latest losses."""

    def __init__(
        self,
        iteration: int,
        target_iterations: int,
        predict: Callable[[], float | None] = lambda: None,
        console: Any = None,
    ) -> None:
        """console: rich's, of the terminal when None. Raises ConfigError where rich is not installed."""
        super().__init__(iteration, target_iterations, predict)
        live, console_module = (require(f"rich.{name}", needed_by=NEEDED_BY) for name in ("live", "console"))
        console = console or console_module.Console()
        self._live = live.Live(console=console, auto_refresh=False, transient=True)
        self._row: MetricsRow | None = None
        self._losses: deque[float] = deque(maxlen=_CURVE)

    def make_room(self) -> None:
        """From now on whatever this process prints appears above the view."""
        self._live.start()

    def leave(self) -> None:
        """Erase the view for good, and give the streams back."""
        self._live.stop()

    def show_row(self, row: MetricsRow) -> None:
        """Show these values from now on."""
        self._row = row
        self._losses += list(row.losses.values())[:1]
        self.redraw()

    def redraw(self) -> None:
        """Draw the view again."""
        self._drawn_at = time.monotonic()
        self._live.update(self.render(), refresh=True)

    def clear(self) -> None:
        """Do nothing: rich itself moves the view below what is printed."""

    def render(self) -> Any:
        """The view, as something that rich draws."""
        table, bars, panel, text = (
            require(f"rich.{name}", needed_by=NEEDED_BY) for name in ("table", "progress_bar", "panel", "text")
        )
        grid = table.Table.grid(padding=(0, 2), expand=True)
        grid.add_column(ratio=1)
        left = self.predict()
        if left is None and self.seconds_per_step:
            left = (self.target - self.iteration) * self.seconds_per_step
        head = f"iteration {self.iteration:,} of {self.target:,}"
        head += f", {format_duration(left)} left" if left is not None else ""
        grid.add_row(text.Text(head, style="bold"))
        grid.add_row(bars.ProgressBar(total=max(1, self.target), completed=self.iteration))
        for line in self._list_values():
            # As text: a name in brackets would be taken for markup.
            grid.add_row(text.Text(line))
        return panel.Panel(grid, title="training", title_align="left", border_style="dim")

    def _list_values(self) -> list[str]:
        row = self._row
        if row is None:
            return []
        values = [f"{name} {loss:.4f}" for name, loss in row.losses.items()]
        for name, label, form in (
            ("grad_norm", "grad norm", "{:.3f}"), ("lr", "lr", "{:.3e}"), ("tokens_per_second", "tokens/s", "{:,.0f}"),
        ):  # fmt: skip
            if row.values.get(name) is not None:
                values.append(f"{label} {form.format(row[name])}")
        if row.values.get("mfu") is not None:
            values.append(f"MFU {row['mfu']:.1%}")
        if row.values.get("peak_memory_bytes") is not None:
            values.append(f"memory {row['peak_memory_bytes'] / 2**30:.1f} GiB")
        return ["   ".join(values), f"loss {draw_curve(list(self._losses))}"]


def draw_curve(values: list[float]) -> str:
    """Values as blocks of eight heights, from the smallest to the largest; a space for what is no number."""
    known = [value for value in values if value == value and abs(value) != float("inf")]
    if not known:
        return ""
    low, span = min(known), (max(known) - min(known)) or 1.0
    return "".join(_BLOCKS[1 + round(7 * (value - low) / span)] if value in known else " " for value in values)

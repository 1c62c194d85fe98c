# SPDX-License-Identifier: Apache-2.0
"""Counts and times of a server, in the text format of Prometheus."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Times:
    """A histogram of seconds."""

    def __init__(self) -> None:
        self.counts, self.sum = [0] * (len(SECONDS) + 1), 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect_left(SECONDS, seconds)] += 1
        self.sum += seconds

    def list_lines(self, name: str) -> Iterator[str]:
        """Cumulated buckets, sum and count."""
        total = 0
        for bound, count in zip((*map(str, SECONDS), "+Inf"), self.counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self.sum:.6f}"
        yield f"{name}_count {total}"


class ServerMetrics:
    """Counts taken where requests come in and go out."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.finished: Counter[str] = Counter()
        self.times = {
            name: Times() for name in ("time_to_first_token_seconds", "time_per_output_token_seconds",
                                       "e2e_request_latency_seconds")
        }  # fmt: skip

    def note(self, reason: str, first: float | None, total: float, tokens: int) -> None:
        """Count a finished request. first: seconds to its first token; total: in all; tokens: new ones."""
        with self._lock:
            self.finished[reason] += 1
            self.times["e2e_request_latency_seconds"].add(total)
            if first is not None:
                self.times["time_to_first_token_seconds"].add(first)
                if tokens > 1:
                    self.times["time_per_output_token_seconds"].add((total - first) / (tokens - 1))

    def format(self, gauges: Mapping[str, float], counters: Mapping[str, float]) -> str:
        """Everything. gauges, counters: of the engine, by name."""
        lines = []
        for kind, values in (("gauge", gauges), ("counter", counters)):
            for name, value in values.items():
                full = f"megatron:{name}" + ("_total" if kind == "counter" else "")
                lines += [f"# TYPE {full} {kind}", f"{full} {value:g}"]
        with self._lock:
            lines.append("# TYPE megatron:request_success_total counter")
            for reason, count in sorted(self.finished.items()):
                lines.append(f'megatron:request_success_total{{finished_reason="{reason}"}} {count}')
            for name, times in self.times.items():
                lines += [f"# TYPE megatron:{name} histogram", *times.list_lines(f"megatron:{name}")]
        return "\n".join(lines) + "\n"

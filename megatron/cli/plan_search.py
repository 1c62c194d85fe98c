# SPDX-License-Identifier: Apache-2.0
"""The layouts that a command line can have on a cluster: each judged by the rules of a run, then by memory and time.

Flags that are given stay; what they leave open is tried. First every division of the processes with micro-batches of
one; then, for the fastest of them, pipeline chunks, larger micro-batches, and recomputation where the memory is short.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.core.errors import format_bytes
from megatron.core.tokenizers.base import Tokenizer
from megatron.planner.devices import Device
from megatron.planner.step_memory import predict_step_memory
from megatron.planner.step_time import predict_step_time, shorten
from megatron.training.config.container import RunConfig
from megatron.training.flags.read import examine
from megatron.training.recipes.gpt import describe_gpt_workload
from megatron.training.recipes.vocabulary import build_tokenizer, compute_padded_vocab_size

GAPS = 1.03
"""Share that the allocator's gaps add to the bytes of tensors."""
_REFINED = 16
"""Divisions whose variants are tried."""
_LEAST_TOKENS_PER_RANK = 2048
"""Of a sequence that context parallelism divides: fewer are not worth an exchange."""
_MOST_STAGES, _MOST_EXPERT_RANKS = 64, 64
_SIZES = {
    "tp": "--tensor-model-parallel-size", "pp": "--pipeline-model-parallel-size", "cp": "--context-parallel-size",
    "ep": "--expert-model-parallel-size",
}  # fmt: skip
_CHUNKS = "--num-virtual-stages-per-pipeline-rank"
RECOMPUTATION = (
    "--recompute-granularity selective --recompute-modules layernorm {act}",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
)
"""From less to more time and memory saved."""


@dataclass
class Layout:
    """One division of the processes, with what the model of memory and time says of it."""

    flags: list[str]
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    chunks: int = 1
    """Virtual stages of each process of the pipeline."""
    micro_batch_size: int = 1
    recompute: str | None = None
    legal: bool = True
    fits: bool = False
    memory_bytes: float | None = None
    """Bytes that the device must hold: tensors, gaps between them, context, buffers of communication."""
    step_bytes: float | None = None
    """Of the step's tensors on the fullest stage."""
    step_seconds: float | None = None
    mfu: float | None = None
    tokens_per_second: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    """Part of a step -> seconds."""
    why: str | None = None
    """Reason against it, or how it compares with the fastest."""
    problems: list[str] = field(default_factory=list)
    """Sentences, each of which makes it illegal."""

    @property
    def name(self) -> str:
        """In short, such as `TP 8, PP 4 x 5`."""
        chunks = f" x {self.chunks}" if self.chunks > 1 else ""
        sizes = [("TP", self.tp, ""), ("PP", self.pp, chunks), ("CP", self.cp, ""), ("EP", self.ep, "")]
        shown = [f"{axis} {size}{more}" for axis, size, more in sizes if size > 1]
        return ", ".join([*shown, f"DP {self.dp}", f"micro-batch {self.micro_batch_size}"])


class Judge:
    """Says of flags whether a run would take them, what they need, and how long a step takes."""

    def __init__(self, gpus: int, device: Device) -> None:
        self.gpus, self.device = gpus, device
        self.config: RunConfig | None = None
        """Of the last layout that was legal."""
        self._tokenizer: Tokenizer | None = None

    def judge(self, flags: Sequence[str]) -> Layout:
        """The layout of these flags. Raises ConfigError or DataError for a tokenizer that cannot be used."""
        found = examine(flags, {"WORLD_SIZE": str(self.gpus)})
        config = found.config
        model = config.model
        layout = Layout(
            list(flags), model.tensor_model_parallel_size, model.pipeline_model_parallel_size,
            model.context_parallel_size, model.expert_model_parallel_size,
        )  # fmt: skip
        if found.problems:
            layout.legal, layout.problems = False, [problem.text for problem in found.problems]
            layout.why = "; ".join(layout.problems)
            # As many as there would be, if the sizes multiplied out.
            layout.dp = self.gpus // (layout.tp * layout.pp * layout.cp)
            layout.micro_batch_size = config.training.micro_batch_size or 1
            return layout
        if self._tokenizer is None:
            self._tokenizer = build_tokenizer(config)
        self.config = config
        workload = describe_gpt_workload(config, compute_padded_vocab_size(config, self._tokenizer))
        layout.dp, layout.micro_batch_size = config.site_replicas * config.sites.sites_of_job, workload.micro_batch_size
        layout.chunks = model.virtual_pipeline_model_parallel_size or 1
        layout.recompute = model.recompute_granularity
        few = describe_gpt_workload(config, workload.padded_vocab_size, shorten(model, workload.num_microbatches))
        stages = predict_step_memory(model, config.ddp, config.optimizer, few)
        layout.step_bytes = max(stage.total for stage in stages)
        groups = [layout.tp, layout.cp, layout.dp * layout.cp, layout.pp, layout.pp, layout.ep]
        buffers = self.device.communicator_bytes * sum(size > 1 for size in groups)
        layout.memory_bytes = layout.step_bytes * GAPS + self.device.reserved_bytes + buffers
        layout.fits = layout.memory_bytes <= self.device.memory_bytes
        if not layout.fits:
            needed, there_is = layout.memory_bytes, self.device.memory_bytes
            over = format_bytes(needed - there_is)
            layout.why = f"needs {format_bytes(needed)} of {format_bytes(there_is)}, {over} too much"
        if max(stage.state for stage in stages) > self.device.memory_bytes:
            # Nothing that is left open makes weights, gradients and optimizer state smaller.
            return layout
        time = predict_step_time(model, config.ddp, config.optimizer, workload, self.device)
        layout.step_seconds, layout.mfu, layout.parts = time.seconds, time.mfu, dict(time.parts)
        # What is waited for at an exchange depends on the line (planner/many_sites.py).
        layout.tokens_per_second = time.tokens_per_second * config.sites.sites_of_job
        return layout


class Search:
    """Tries what the given flags leave open."""

    def __init__(self, judge: Judge, flags: Sequence[str], say: Callable[[str], None]) -> None:
        self.judge, self.flags, self.say = judge, list(flags), say
        found = examine(flags, {"WORLD_SIZE": "1"}, trains=False)
        self.config, self.is_given = found.config, found.config.sources
        self.tried: list[Layout] = []
        self._splits: dict[int, list[list[str]]] = {}
        """Number of stages -> the flags that deal the layers out."""

    def run(self, only_dp: int | None = None) -> list[Layout]:
        """Every layout that was tried, the fastest of those that fit first. only_dp: replicas that it must have."""
        divisions = list(self.list_divisions(only_dp))
        self.say(f"{len(divisions)} divisions of {self.judge.gpus} processes")
        legal = []
        for sizes in divisions:
            layout = self._try_division(sizes)
            self.tried.append(layout)
            if layout.step_seconds is not None:
                legal.append(layout)
        legal.sort(key=lambda layout: layout.step_seconds or 0.0)
        fitting = 0
        for number, layout in enumerate(legal):
            # Where little fits, more is tried, as far as it takes.
            if number >= _REFINED and (fitting or number >= 4 * _REFINED):
                break
            found = list(self._vary(layout))
            self.tried += found
            fitting += layout.fits or any(variant.fits for variant in found)
        self.tried.sort(key=lambda layout: (not layout.fits, not layout.legal, layout.step_seconds or 0.0))
        if self.tried and self.tried[0].fits:
            for layout in self.tried[1:]:
                if layout.fits:
                    layout.why = compare(layout, self.tried[0])
        return self.tried

    def list_divisions(self, only_dp: int | None) -> Iterator[dict[str, int]]:
        """Sizes of tp, pp, cp and ep that multiply out, given ones as they are."""
        model, gpus = self.config.model, self.judge.gpus
        powers = [2**power for power in range(20) if 2**power <= gpus]
        divisors = [size for size in range(1, min(gpus, _MOST_STAGES) + 1) if gpus % size == 0]
        options = {
            "tp": [size for size in powers if size <= self.judge.device.devices_per_node and size <= 16],
            "pp": [size for size in divisors if size <= max(1, model.num_layers or 1)],
            "cp": [
                size for size in powers
                if size == 1 or (self.config.data.seq_length or 1) >= size * _LEAST_TOKENS_PER_RANK and size <= 64
            ],
            "ep": [size for size in powers if size <= _MOST_EXPERT_RANKS and (model.num_moe_experts or 1) % size == 0]
            if model.num_moe_experts else [1],
        }  # fmt: skip
        for axis, flag in _SIZES.items():
            if self.is_given[flag] != "default":
                field_name = flag.removeprefix("--").replace("-", "_")
                options[axis] = [getattr(model, field_name)]
        for tp, pp, cp, ep in itertools.product(*options.values()):
            copies, rest = divmod(gpus, tp * pp * cp)
            given = all(self.is_given[flag] != "default" for flag in _SIZES.values())
            if (rest or (only_dp is not None and copies != only_dp)) and not given:
                continue
            # Experts are divided over replicas and the ranks of a sequence.
            if ep > max(1, tp * cp * copies) and not given:
                continue
            yield {"tp": tp, "pp": pp, "cp": cp, "ep": ep}

    def list_given_sizes(self) -> list[str]:
        """The sizes that are not left open, as flags."""
        model = self.config.model
        fields = ((flag, flag.removeprefix("--").replace("-", "_")) for flag in _SIZES.values())
        return [f"{flag} {getattr(model, name)}" for flag, name in fields if self.is_given[flag] != "default"]

    def _try_division(self, sizes: dict[str, int]) -> Layout:
        words = [*self.flags, *self._name_sizes(sizes), *self._name_companions(sizes)]
        if self.is_given["--micro-batch-size"] == "default":
            words += ["--micro-batch-size", "1"]
        layout = None
        for split in self._splits.get(sizes["pp"]) or [[], *self._list_splits(sizes["pp"])]:
            found = self.judge.judge([*words, *split])
            if found.legal:
                # Whether layers can be split so depends on the number of stages only.
                self._splits[sizes["pp"]] = [split]
                return found
            layout = layout or found
        assert layout is not None, "one division at least was judged"
        return layout

    def _name_sizes(self, sizes: dict[str, int]) -> list[str]:
        named = ((flag, sizes[axis]) for axis, flag in _SIZES.items() if self.is_given[flag] == "default")
        return [word for flag, size in named if size > 1 for word in (flag, str(size))]

    def _name_companions(self, sizes: dict[str, int]) -> list[str]:
        """Flags without which such a layout would waste memory or time, where they are not given."""
        found: list[tuple[str, ...]] = []
        if sizes["tp"] > 1:
            found.append(("--sequence-parallel",))
        shards_by_itself = self.config.ddp.use_torch_fsdp2 or self.config.optimizer.optimizer not in ("adam", "adamw")
        if self.judge.gpus > sizes["tp"] * sizes["pp"] and not shards_by_itself:
            found += [("--use-distributed-optimizer",), ("--overlap-grad-reduce",), ("--overlap-param-gather",)]
        if sizes["ep"] > 1:
            found += [("--expert-tensor-parallel-size", "1"), ("--moe-token-dispatcher-type", "alltoall")]
        if self.config.model.num_moe_experts:
            found.append(("--moe-grouped-gemm",))
        return [word for words in found if self.is_given.get(words[0]) == "default" for word in words]

    def _list_splits(self, stages: int) -> Iterator[list[str]]:
        """Yield flags that assign layers to stages where they do not divide evenly."""
        layers = self.config.model.num_layers or 0
        if stages == 1 or self.config.model.hybrid_layer_pattern:
            return
        yield ["--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"]
        # The last stage has the output layer, too, and the first ones hold more microbatches.
        last = layers - -(-layers // stages) * (stages - 1)
        if last > 0:
            yield ["--decoder-last-pipeline-num-layers", str(last)]
        least = layers // stages
        if stages > 2 and least and (layers - 2 * least) % (stages - 2):
            spare = (layers - 2 * least) % (stages - 2)
            inner = (layers - spare) // stages
            both = layers - inner * (stages - 2)
            ends = ["--decoder-first-pipeline-num-layers", str(both - both // 2)]
            yield [*ends, "--decoder-last-pipeline-num-layers", str(both // 2)]

    def _vary(self, layout: Layout) -> Iterator[Layout]:
        """Chunks, larger micro-batches, and recomputation of a division."""
        fitting = [layout] if layout.fits else []
        for words in self._list_chunks(layout):
            yield (found := self._add(layout, words))
            fitting += [found] if found.fits else []
        act = "moe_act" if self.config.model.num_moe_experts else "mlp_act"
        if not fitting and self.is_given["--recompute-granularity"] == "default":
            for text in RECOMPUTATION:
                yield (found := self._add(layout, text.format(act=act).split()))
                if found.fits:
                    fitting.append(found)
                    break
        if self.is_given["--micro-batch-size"] != "default":
            return
        best = min(fitting, key=lambda found: found.step_seconds or 0.0, default=None)
        size = 2
        while best is not None and size <= 16:
            yield (found := self._add(best, ["--micro-batch-size", str(size)]))
            if not found.fits or (found.step_seconds or 0.0) >= (best.step_seconds or 0.0):
                break
            best, size = found, 2 * size

    def _list_chunks(self, layout: Layout) -> Iterator[list[str]]:
        """Numbers of chunks of a stage, where nothing is said about them: two, and as many as it has layers."""
        model = self.config.model
        open_ = all(
            self.is_given.get(flag, "default") == "default"
            for flag in (_CHUNKS, "--num-layers-per-virtual-pipeline-stage", "--pipeline-schedule")
        )
        if layout.pp == 1 or not open_ or any("pipeline-num-layers" in word for word in layout.flags):
            return
        ends = 2 if "--account-for-loss-in-pipeline-split" in layout.flags else 0
        per_stage = ((model.num_layers or 0) + ends) // layout.pp
        sizes = [size for size in range(2, per_stage + 1) if per_stage % size == 0]
        for size in dict.fromkeys([*sizes[:1], *sizes[-1:]]):
            yield [_CHUNKS, str(size)]

    def _add(self, layout: Layout, words: Sequence[str]) -> Layout:
        flags = list(layout.flags)
        # Of a flag that is there twice the later one would count; one is clearer.
        if words[0] in flags:
            at = flags.index(words[0])
            del flags[at : at + 2]
        return self.judge.judge([*flags, *words])


def compare(layout: Layout, best: Layout) -> str:
    """Say why a layout is slower than the best one: by how much, and the part of a step that grew most."""
    assert layout.step_seconds and best.step_seconds, "both were judged"
    slower = layout.step_seconds / best.step_seconds - 1
    grown = {part: seconds - best.parts.get(part, 0.0) for part, seconds in layout.parts.items()}
    part = max(grown, key=lambda name: grown[name])
    more = f", {part} {grown[part] / best.step_seconds:+.1%} of a step" if grown[part] > 0 else ""
    return f"{slower:.1%} slower than {best.name}{more}"


LARGEST_JOB = 1 << 16
"""Devices up to which a fit is looked for."""


def find_smallest_fit(device: Device, gpus: int, flags: Sequence[str]) -> Layout | None:
    """The layout with the fewest processes that fits this model, of numbers that are doubled from so many and then of
    sixteenths between the last two, in whole nodes; None where none does."""
    found = None
    while found is None and (gpus := 2 * gpus) <= LARGEST_JOB:
        found = _find_fit(device, gpus, flags)
    node = int(device.devices_per_node)
    between = range(gpus // 2 + max(1, gpus // 16), gpus, max(1, gpus // 16)) if found is not None else ()
    for fewer in between:
        if (fewer % node == 0 or fewer < node) and (smaller := _find_fit(device, fewer, flags)) is not None:
            return smaller
    return found


def _find_fit(device: Device, gpus: int, flags: Sequence[str]) -> Layout | None:
    search = Search(Judge(gpus, device), flags, lambda text: None)
    # The divisions that keep the least on a process, computed again where that helps.
    for sizes in sorted(search.list_divisions(None), key=lambda s: -s["tp"] * s["pp"] * s["cp"] * s["ep"])[:12]:
        layout = search._try_division(sizes)
        for candidate in [layout] if layout.legal else []:
            found = candidate if candidate.fits else search._add(candidate, RECOMPUTATION[1].split())
            if found.fits:
                return found
    return None


def to_json(layout: Layout) -> dict[str, Any]:
    """A layout as the JSON file has it."""
    return vars(layout) | {"command": shlex.join(layout.flags)}

# SPDX-License-Identifier: Apache-2.0
"""Items of `python -m benchmarks gpu` that train models: each takes the largest form that fits into the device."""

from __future__ import annotations

import dataclasses
import shlex

from benchmarks.forms import Form
from benchmarks.gpu_item import Part
from benchmarks.measurements import FLOP_FORMULA, Measurement, choose_dtype
from benchmarks.packed_documents import build_packed_datasets
from benchmarks.training import (
    Preset,
    StepClock,
    describe_error,
    is_memory_shortage,
    measure_ours,
    summarise,
    train_here,
)
from megatron.core import device as device_module
from megatron.core.errors import MegatronError

FP8 = "--fp8-format hybrid --fp8-recipe tensorwise"
OFFLOADED = """--fine-grained-activation-offloading
    --offload-modules attn_norm qkv_linear core_attn attn_proj mlp_norm mlp_fc1 mlp_act"""
GRAPHS = "--cuda-graph-impl local --cuda-graph-warmup-steps 1"


def measure_form(part: Part, form: Form, more: str = "", *, steps: int, warm_ups: int = 3) -> Measurement:
    """Time training steps of a form; fewer where the time does not suffice. Raises MegatronError."""
    if part.is_tiny:
        steps, warm_ups = 2, 1
    flags = part.flags(form.preset, steps + warm_ups, f"{form.flags} {more}")
    part.note(flags=shlex.join(flags), formula=FLOP_FORMULA, form=form.describe())
    found = measure_ours(form.preset.text, flags, warm_ups, part.deadline())
    print("\n".join(found.details["log"]))
    return found


def measure_largest(
    part: Part, preset: Preset, *variants: str, steps: int, warm_ups: int = 3
) -> tuple[Form, list[Measurement]]:
    """Time each variant's steps in the largest form of a preset in which all of them fit, by the formula and then in
    truth."""
    forms = part.find_forms(preset, *variants)
    for form in forms:
        found: list[Measurement] = []
        try:
            for more in variants or ("",):
                found.append(measure_form(part, form, more, steps=steps, warm_ups=warm_ups))
                part.note(describe_speed(found[-1], form), **{more or "step": dataclasses.asdict(found[-1])})
        except (MegatronError, RuntimeError) as error:
            if not is_memory_shortage(error) or form is forms[-1]:
                raise
            part.note(**{f"out of memory, {form.describe()}": describe_error(error)})
            continue
        return form, found
    raise AssertionError("the last form raises")


def describe_speed(found: Measurement, form: Form) -> str:
    """Tokens per second, TFLOP/s and their share of the data sheet's peak, memory beside the formula's."""
    rate = (found.flops or 0.0) / found.seconds
    peak = device_module.get_dense_peak_flops(choose_dtype())
    share = f" ({100 * rate / peak:.1f} % of the data sheet's dense peak)" if peak else ""
    return (
        f"{found.details['tokens/s']:.0f} tokens/s, {rate / 1e12:.4g} TFLOP/s{share}, peak "
        f"{found.details['peak GiB']} GiB; {form.describe()}"
    )


def train_1b(part: Part) -> None:
    """1B, eager."""
    measure_largest(part, part.preset("1b"), steps=12)


def train_1b_compiled(part: Part) -> None:
    """1B with torch.compile."""
    measure_largest(part, part.preset("1b"), "--compile", steps=8)


def train_8b(part: Part) -> None:
    """8B with small optimizer state."""
    measure_largest(part, part.preset("8b"), steps=6, warm_ups=2)


def train_moe(part: Part) -> None:
    """8 experts of a 1B model."""
    measure_largest(part, part.preset("moe"), steps=10)


def _compare(part: Part, preset: Preset, more: str, *, what: str, steps: int) -> None:
    form, (plain, other) = measure_largest(part, preset, "", more, steps=steps, warm_ups=2)
    ratio = plain.seconds / other.seconds
    before, after = plain.details["peak GiB"], other.details["peak GiB"]
    part.note(f"{what}: {ratio:.3f}x of the speed, {after} GiB for {before}; {form.describe()}", ratio=ratio)


def train_fp8(part: Part) -> None:
    """Layers of 8B, in bfloat16 and in FP8."""
    _compare(part, part.preset("8b-slice"), FP8, what="FP8", steps=3)


def train_offloaded(part: Part) -> None:
    """Layers of 8B, with their activations on the device and on the host."""
    _compare(part, part.preset("8b-slice"), OFFLOADED, what="activations on the host", steps=3)


def train_with_graphs(part: Part) -> None:
    """1B in micro-batches of one sequence, where launching counts: eager, and by CUDA graphs."""
    preset = dataclasses.replace(part.preset("1b"), micro_batch=1, global_batch=4)
    _compare(part, preset, GRAPHS, what="CUDA graphs", steps=6)


def train_documents(part: Part) -> None:
    """Packed documents of random lengths against one document of the whole sequence, the same model and tokens."""
    form = part.find_forms(part.preset("8b-slice"))[0]
    preset = form.preset
    sizes = dataclasses.replace(preset.sizes, layers=min(4, preset.sizes.layers))
    preset = dataclasses.replace(preset, sizes=sizes, micro_batch=1, global_batch=2)
    steps, warm_ups = (2, 1) if part.is_tiny else (10, 3)
    found = {}
    for name in ("one document", "documents"):
        clock = StepClock(part.deadline())
        build = build_packed_datasets(preset.sequence, preset.sizes.vocab, whole=name == "one document")
        train_here(part.flags(preset, steps + warm_ups, form.flags), [clock], build_datasets=build)
        found[name] = summarise(name, clock, warm_ups)
        part.note(**{name: dataclasses.asdict(found[name])})
    ratio = found["documents"].seconds / found["one document"].seconds
    part.note(f"packed documents take {ratio:.3f}x of the time of one long document", ratio=ratio)

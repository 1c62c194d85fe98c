# SPDX-License-Identifier: Apache-2.0
"""`--preset NAME`: the model flags of a published model, so that they need not be written out; `--preset-layout`: the
layout that is recommended for it.

They stand before the flags of a checkpoint, of the YAML file and of the command line, which win. `--preset list` prints
what there is.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from megatron.training.config.model import ACTIVATION_SWITCHES
from megatron.training.flags.declarations import flags_by_spelling
from megatron.training.flags.given import Given, ParsedFlags, divide_tokens
from megatron.training.recipes.families import find_family
from megatron.training.recipes.layouts import LAYOUTS, choose_layout
from megatron.training.recipes.presets import PRESETS, Preset

LIST = "list"
# It has no vocabulary; every other tokenizer says how many tokens there are.
_WITHOUT_VOCABULARY = "NullTokenizer"


def add_preset_flags(parsed: ParsedFlags, world_size: int) -> None:
    """Enter what --preset says and nobody has said otherwise; note what wins over it.

    world_size: the number of processes, for --preset-layout.
    """
    entry = parsed.given.get("preset")
    asks_for_layout = "preset_layout" in parsed.given and parsed.given["preset_layout"].value
    if entry is None and asks_for_layout:
        parsed.misspelt("--preset-layout is the layout of a preset; give --preset NAME, or leave it out")
    if entry is None or entry.value == LIST:
        return
    preset = PRESETS.get(entry.value.lower())
    if preset is None:
        closest = difflib.get_close_matches(entry.value.lower(), PRESETS, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(closest)}? " if closest else ""
        # Any preset would have given the sizes: that they are missing is no news.
        missing = [given.flag for given in _read_model_flags(next(iter(PRESETS.values()))).values()]
        parsed.misspelt(f"--preset {entry.value} is not known; {hint}--preset list shows all {len(PRESETS)}", *missing)
        return
    flags = _read_model_flags(preset)
    if asks_for_layout:
        flags |= _read_layout_flags(parsed, preset.name, world_size)
    tokenizer = parsed.given.get("tokenizer_type")
    if tokenizer is None or tokenizer.value != _WITHOUT_VOCABULARY:
        del flags["vocab_size"]
    won = [
        flags[dest].written
        for dest, given in parsed.given.items()
        if dest in flags and flags[dest].value != given.value
    ]
    # A switch cannot be taken back, so that another activation than the preset's takes its place.
    if any(name in parsed.given and name not in flags for name in ACTIVATION_SWITCHES):
        won += [flags.pop(name).written for name in ACTIVATION_SWITCHES if name in flags]
    if won:
        parsed.notes.append(f"--preset {preset.name} means {', '.join(won)}; what is given instead wins")
    parsed.given = flags | parsed.given


def _read_model_flags(preset: Preset) -> dict[str, Given]:
    flags = preset.build_flags()
    # Rotary positions end nowhere, so that only some families have this among their flags.
    if not any(flag.startswith("--max-position-embeddings") for flag in flags):
        flags.append(f"--max-position-embeddings {preset.context}")
    return read_flags(preset.name, [*flags, f"--vocab-size {preset.fields['vocab_size']}"])


def _read_layout_flags(parsed: ParsedFlags, name: str, world_size: int) -> dict[str, Given]:
    layout = choose_layout(name, world_size)
    if layout is None:
        found = " and ".join(str(layout.gpus) for layout in LAYOUTS.get(name, ()))
        there_is = f"{found} GPUs, or multiples of them" if found else "no number of GPUs"
        parsed.misspelt(
            f"--preset-layout: the preset {name} has layouts for {there_is}, and this run has {world_size} "
            f"process{'es' if world_size > 1 else ''}; leave it out and give --tensor-model-parallel-size and its like"
        )
        return {}
    flags = layout.build_flags()
    parsed.notes.append(
        f"--preset-layout means {' '.join(flags)}: for {layout.gpus} GPUs of 80 GB or a multiple, and up to "
        f"{layout.micro_batch_size} x {layout.seq_length} tokens in a micro-batch"
    )
    return read_flags(name, flags)


def read_flags(preset: str, flags: Sequence[str]) -> dict[str, Given]:
    """Read the flags that a preset of this name stands for."""
    # One text may have several flags, such as a switch and the size that it asks for.
    words = [word for flag in flags for word in flag.split()]
    read = ParsedFlags()
    for name, values in divide_tokens(words):
        read.give(flags_by_spelling()[name], name, values, "preset")
    assert not read.problems, f"{preset}: {read.problems}"
    return read.given


def format_presets() -> str:
    """Every preset in a line: parameters, those that work on one token, the shape, GPUs that --preset-layout knows."""
    header = ("name", "parameters", "active", "layers", "hidden", "context", "GPUs", "family")
    rows: list[tuple[str, ...]] = [header]
    for preset in PRESETS.values():
        sizes = [preset.fields.get(name) or preset.fields[other] for name, other in _SIZES]
        context = f"{preset.context // 1024}K"
        rows.append(
            (preset.name, preset.parameters, preset.active or "-", *map(str, sizes), context,
             ",".join(str(layout.gpus) for layout in LAYOUTS.get(preset.name, ())) or "-",
             find_family(preset.model_type).name)
        )  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = []
    for row in rows:
        first, *numbers, family = (text.rjust(width) for text, width in zip(row, widths, strict=True))
        lines.append("  ".join([row[0].ljust(len(first)), *numbers, family.strip()]))
    return "\n".join(lines) + "\n"


_SIZES = (("num_hidden_layers", "n_layer"), ("hidden_size", "n_embd"))

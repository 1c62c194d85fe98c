# SPDX-License-Identifier: Apache-2.0
"""`--preset NAME`: the model flags of a published model, so that they need not be written out.

They stand before the flags of a checkpoint, of the YAML file and of the command line, which win. `--preset list` prints
what there is.
"""

from __future__ import annotations

import difflib

from megatron.training.config.model import ACTIVATION_SWITCHES
from megatron.training.flags.parser import Given, ParsedFlags, flags_by_spelling
from megatron.training.recipes.families import find_family
from megatron.training.recipes.presets import PRESETS, Preset

LIST = "list"
# It has no vocabulary of its own; every other tokenizer says how many tokens there are.
_WITHOUT_VOCABULARY = "NullTokenizer"


def add_preset_flags(parsed: ParsedFlags) -> None:
    """Where --preset is given, enter what it says and nobody has said otherwise; note what wins over it."""
    entry = parsed.given.get("preset")
    if entry is None or entry.value == LIST:
        return
    preset = PRESETS.get(entry.value.lower())
    if preset is None:
        closest = difflib.get_close_matches(entry.value.lower(), PRESETS, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(closest)}? " if closest else ""
        # Any preset would have given the sizes: that they are missing is no news.
        missing = [given.flag for given in _read_flags(next(iter(PRESETS.values()))).values()]
        parsed.misspelt(f"--preset {entry.value} is not known; {hint}--preset list shows all {len(PRESETS)}", *missing)
        return
    flags = _read_flags(preset)
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


def _read_flags(preset: Preset) -> dict[str, Given]:
    words = [word for flag in preset.build_flags() for word in flag.split()]
    # Rotary positions end nowhere, so that only some families have this among their flags.
    if "--max-position-embeddings" not in words:
        words += ["--max-position-embeddings", str(preset.context)]
    words += ["--vocab-size", str(preset.fields["vocab_size"])]
    read = ParsedFlags()
    starts = [index for index, word in enumerate(words) if word.startswith("--")]
    for start, end in zip(starts, [*starts[1:], len(words)], strict=True):
        read.give(flags_by_spelling()[words[start]], words[start], words[start + 1 : end], "preset")
    assert not read.problems, f"{preset.name}: {read.problems}"
    return read.given


def format_presets() -> str:
    """Every preset in a line: parameters, those that work on one token, the shape."""
    header = ("name", "parameters", "active", "layers", "hidden", "context", "family")
    rows: list[tuple[str, ...]] = [header]
    for preset in PRESETS.values():
        sizes = [preset.fields.get(name) or preset.fields[other] for name, other in _SIZES]
        context = f"{preset.context // 1024}K"
        rows.append(
            (preset.name, preset.parameters, preset.active or "-", *map(str, sizes), context,
             find_family(preset.model_type).name)
        )  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = []
    for row in rows:
        first, *numbers, family = (text.rjust(width) for text, width in zip(row, widths, strict=True))
        lines.append("  ".join([row[0].ljust(len(first)), *numbers, family.strip()]))
    return "\n".join(lines) + "\n"


_SIZES = (("num_hidden_layers", "n_layer"), ("hidden_size", "n_embd"))

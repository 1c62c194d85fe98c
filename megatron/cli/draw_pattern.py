# SPDX-License-Identifier: Apache-2.0
"""Draw the layers of a decoder of letters, in the pipeline stages that its cuts make.

    python tools/draw_pattern.py "M-M*-|MEM*E"
    python tools/draw_pattern.py "M-M*-|MEM*E" --output pattern.svg

In the terminal a line for each stage, with the numbers of its first and last layer; in a picture (.png, .svg, .pdf,
which needs matplotlib) a row of boxes. Layers of one kind have one colour, and what generation keeps of each is below.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from megatron.core.errors import ConfigError, command_line
from megatron.core.optional_deps import require
from megatron.core.plan.kinds import find_kind, list_letters
from megatron.core.plan.letters import find_letters_problem, split_letters
from megatron.training.flags.argument import FlagParser, path

COLOURS = ("#4c78a8", "#72b7b2", "#bab0ac", "#f58518", "#54a24b", "#b279a2", "#e45756", "#9d755d", "#eeca3b")
"""Of the kinds in the order of their table."""


def read_stages(pattern: str) -> list[tuple[str, str]]:
    """The name and the letters of each stage, and of multi-token prediction. Raises ConfigError for a pattern that
    cannot be read."""
    known = list_letters()
    if problem := find_letters_problem(pattern, known):
        raise ConfigError(f"the pattern {pattern} {problem}")
    letters = split_letters(pattern)
    stages = [(f"stage {number}", part) for number, part in enumerate(letters.segments)]
    if letters.predictions:
        stages.append((f"{len(letters.predictions)} x prediction", letters.predictions[0]))
    return stages


def format_stages(stages: Sequence[tuple[str, str]]) -> str:
    """A line for each stage, and one for each kind."""
    width, lines, first = max(len(name) for name, _ in stages), [], 1
    for name, letters in stages:
        numbers = f"layers {first} to {first + len(letters) - 1}" if letters else "no layers"
        lines.append(f"{name:<{width}}  {' '.join(letters)}    {numbers}")
        first += len(letters)
    lines.append("")
    counts = Counter(letter for _, letters in stages for letter in letters)
    lines += [f"{letter}  {describe(letter)}: {count}" for letter, count in counts.items()]
    return "\n".join(lines)


def describe(letter: str) -> str:
    """A kind's name, and what generation keeps of it."""
    kind = find_kind(list_letters()[letter])
    kept = {None: "keeps nothing", "per token": "keeps something of each token", "per sequence": "keeps one state"}
    return f"{kind.name.replace('_', ' ')}, {kept[kind.state]}"


def save_picture(stages: Sequence[tuple[str, str]], output: Path) -> None:
    """A row of boxes for each stage. Raises ConfigError without matplotlib, or for a file that cannot be written."""
    matplotlib = require("matplotlib", needed_by=f"--output {output}")
    matplotlib.use("Agg")
    plt = require("matplotlib.pyplot", needed_by=f"--output {output}")
    used = dict.fromkeys(letter for _, letters in stages for letter in letters)
    colours = dict(zip(list_letters(), COLOURS * 2, strict=False))
    longest = max(len(letters) for _, letters in stages)
    figure, axes = plt.subplots(figsize=(1.6 + 0.42 * max(longest, 12), 0.9 + 0.55 * len(stages) + 0.24 * len(used)))
    first = 1
    for row, (name, letters) in enumerate(stages):
        axes.text(-0.3, -row, name, ha="right", va="center", fontsize=10)
        for column, letter in enumerate(letters):
            box = plt.Rectangle((column + 0.05, -row - 0.36), 0.9, 0.72, color=colours[letter], linewidth=0)
            axes.add_patch(box)
            axes.text(column + 0.5, -row + 0.04, letter, ha="center", va="center", color="white", fontsize=13)
            axes.text(
                column + 0.5, -row - 0.27, str(first + column), ha="center", va="center", color="white", fontsize=6
            )
        first += len(letters)
    for line, letter in enumerate(used):
        below = -len(stages) - 0.45 * line
        axes.add_patch(plt.Rectangle((0.05, below - 0.14), 0.5, 0.28, color=colours[letter], linewidth=0))
        axes.text(0.8, below, f"{letter}   {describe(letter)}", va="center", fontsize=9)
    axes.set_xlim(-2.6, max(longest, 12) + 0.2)
    axes.set_ylim(-len(stages) - 0.45 * len(used), 0.6)
    axes.set_axis_off()
    figure.tight_layout()
    try:
        figure.savefig(output, metadata={"Date": None} if output.suffix == ".svg" else None)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--output {output} cannot be written: {error}") from error
    finally:
        plt.close(figure)


@command_line
def main() -> int:
    """Print the stages, or save their picture."""
    parser = FlagParser(description="Draw the layers of a decoder of letters.", allow_abbrev=False)
    parser.add_argument("pattern", help="as --hybrid-layer-pattern takes it")
    parser.add_argument("--output", type=path, help="write a picture: FILE.png, FILE.svg or FILE.pdf")
    arguments: argparse.Namespace = parser.parse_args(sys.argv[1:])
    stages = read_stages(arguments.pattern)
    print(format_stages(stages))
    if arguments.output is not None:
        save_picture(stages, arguments.output)
        print(f"wrote {arguments.output}")
    return 0

#!/usr/bin/env python
"""Is a configuration the same run under several layouts? Tries it on this machine's CPU.

    python tools/check_parity.py FLAGS... --layouts tp2 "tp2,sp,pp2" "dp2,dist-opt"

FLAGS are those of pretrain_gpt.py; give a small model, a short sequence and a small batch. Every layout trains a few
iterations in processes of its own and is compared with one process: losses, the first iteration's gradients and the
updated weights, parameter by parameter. Exit code 0 when all agree, 1 when one differs.

A layout is a list of tpN ppN cpN dpN vppN epN etpN sp dist-opt overlap overlap-all fsdp2, or any flag as
--name or --name=value.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.errors import ConfigError, command_line  # noqa: E402
from megatron.training.flags.read import read_run_config  # noqa: E402
from megatron.training.verify.parity_layouts import Layout, choose_padding, find_guilty_parts, parse_layout  # noqa: E402

if TYPE_CHECKING:
    from megatron.training.verify.parity import RankTrace, Trace

_USAGE = "give the flags of pretrain_gpt.py, then --layouts and one or more layouts such as tp2 tp2,sp,pp2"
_LISTED = 8


def parse_arguments(argv: Sequence[str]) -> tuple[list[str], list[Layout], int]:
    """(flags of the run, layouts, iterations). Raises ConfigError."""
    flags, layouts, iterations = [], [], 3
    tokens = list(argv)
    while tokens:
        token = tokens.pop(0)
        if token == "--layouts":
            # A layout never begins with "--" on the command line: flags inside of one follow a comma.
            while tokens and not tokens[0].startswith("--"):
                layouts.append(parse_layout(tokens.pop(0)))
        elif token == "--iterations":
            text = tokens.pop(0) if tokens else ""
            if not text.isdecimal() or not 1 <= int(text) <= 1000:
                raise ConfigError(f"--iterations {text!r} is not a whole number from 1 to 1000")
            iterations = int(text)
        else:
            flags.append(token)
    if not layouts:
        raise ConfigError(f"--layouts is missing; {_USAGE}")
    return flags, layouts, iterations


def train_share(rank: int, argv: Sequence[str], world_size: int, iterations: int) -> RankTrace:
    """One rank's part of the run, in a process of its own."""
    # Imported here, in the forked process: the parent answers mistakes without loading torch.
    from megatron.training.recipes.gpt import build_gpt_recipe
    from megatron.training.verify.parity import trace_rank

    config = read_run_config(argv, {"WORLD_SIZE": str(world_size)})
    recipe = build_gpt_recipe(config)
    return trace_rank(config, recipe, rank=rank, iterations=iterations)


class Comparison:
    """One configuration; layouts are run when asked for."""

    def __init__(self, flags: Sequence[str], iterations: int, padding: dict[str, int]) -> None:
        self.flags, self.iterations, self.padding = list(flags), iterations, padding
        self.reference = self.trace(parse_layout("1"))

    def command_line(self, layout: Layout) -> list[str]:
        """Return the flags of a run under the layout; the layout's own come last, so that they win."""
        divisible_by = self.padding["1"] // layout.sizes["tp"]
        return [*self.flags, *_SETTINGS, "--make-vocab-size-divisible-by", str(divisible_by), *layout.flags]

    def trace(self, layout: Layout) -> Trace:
        """Losses, gradients and weights under a layout. Raises MegatronError where it cannot run."""
        from megatron.training.launch.local_job import run_locally
        from megatron.training.verify.parity import join

        arguments: tuple[Any, ...] = (self.command_line(layout), layout.world_size, self.iterations)
        return join(run_locally(train_share, layout.world_size, arguments))

    def differences(self, layout: Layout) -> list[str]:
        """Sentences, the earliest difference first; prints a line about the layout."""
        from megatron.training.verify.parity import compare, find_largest_differences

        found = self.trace(layout)
        differences = compare(self.reference, found)
        sizes = ", ".join(
            f"{what} {size:.1e}" for what, size in find_largest_differences(self.reference, found).items()
        )
        verdict = f"{len(differences)} DIFFERENCES" if differences else "the same run"
        print(
            f"{layout.text} ({layout.world_size} processes): {verdict}; largest relative differences: {sizes}",
            flush=True,
        )
        return differences


# Masks depend on which ranks draw them: that is not what is asked here. Adam with its usual epsilon turns gradients
# that are zero but for rounding (the bias of keys) into whole steps. Evaluation and loader processes play no part.
_SETTINGS = "--hidden-dropout 0 --attention-dropout 0 --adam-eps 1e-5 --eval-iters 0 --num-workers 0".split()


def main(argv: Sequence[str] | None = None) -> int:
    """Run all layouts; 1 when one of them differs."""
    flags, layouts, iterations = parse_arguments(sys.argv[1:] if argv is None else argv)
    alone = parse_layout("1")
    config = read_run_config([*flags, *_SETTINGS], {})
    padding = choose_padding([alone, *layouts], config.gpt.make_vocab_size_divisible_by)
    _check_all(flags, [alone, *layouts], padding)
    if config.model.bf16:
        print("note: --bf16 rounds; expect differences around 1e-2, or leave it out to check the layout itself")
    print("note: without dropout, and with --adam-eps 1e-5, so that rounding stays rounding")
    comparison = Comparison(flags, iterations, dict(padding))
    print(
        f"one process, {iterations} iterations: losses",
        *(f"{loss['lm loss']:.6f}" for loss in comparison.reference.losses),
    )
    differing = 0
    for layout in layouts:
        differences = comparison.differences(layout)
        if differences:
            differing += 1
            print(*(f"  {text}" for text in differences[:_LISTED]), sep="\n")
            if len(differences) > _LISTED:
                print(f"  and {len(differences) - _LISTED} more")
            guilty = find_guilty_parts(layout, lambda part: bool(comparison.differences(part)))
            print(f"  the smallest part of {layout.text} that differs: {'; '.join(guilty)}", flush=True)
    return 1 if differing else 0


def _check_all(flags: Sequence[str], layouts: Sequence[Layout], padding: Any) -> None:
    """Refuse every illegal layout before anything runs. Raises ConfigError with all problems."""
    problems: dict[str, None] = {}
    for layout in layouts:
        divisible_by = ["--make-vocab-size-divisible-by", str(padding[layout.text])]
        try:
            read_run_config([*flags, *_SETTINGS, *divisible_by, *layout.flags], {"WORLD_SIZE": str(layout.world_size)})
        except ConfigError as error:
            problems |= dict.fromkeys(f"layout {layout.text}: {problem}" for problem in error.problems)
    if problems:
        raise ConfigError(list(problems))


if __name__ == "__main__":
    sys.exit(command_line(main)())

# SPDX-License-Identifier: Apache-2.0
"""Is a configuration the same run under several layouts? And are its gradients the derivatives of its loss? Tries it
on this machine's CPU.

    python tools/check_parity.py FLAGS... --layouts tp2 "tp2,sp,pp2" "dp2,dist-opt"
    python tools/check_parity.py FLAGS... --gradients

FLAGS are flags of pretrain_gpt.py, for one process; give a small model, a short sequence and a small batch. Every
layout trains a few iterations (--iterations N, 3) in separate processes and is compared with one process:
activations, losses, the first iteration's gradients, updated weights and buffers. Exit code 0 when all agree, 1 when
one differs; where one cannot run, the code of its error. --all shows every difference instead of the first few.

--gradients takes the command line of a cluster as it is, shrinks it to one process (as tools/shrink.py does) and
compares the gradient of every tensor with differences of the loss in float64, and with the same gradient in the run's
dtype. Exit code 1 where a tensor differs, with its name.

A layout is a list of tpN ppN cpN dpN vppN epN etpN sp dist-opt overlap overlap-all fsdp2, or any flag as
--name or --name=value.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.core.errors import ConfigError, MegatronError, command_line, report_error
from megatron.training.flags.read import examine, read_run_config
from megatron.training.flags.shrink import shrink
from megatron.training.verify.parity_layouts import (
    SIZE_FLAGS,
    ParityLayout,
    choose_padding,
    find_smallest_part,
    parse_layout,
)

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.training.verify.comparison import ParityFinding
    from megatron.training.verify.parity import RankTrace, Trace

_USAGE = "give the flags of pretrain_gpt.py, then --gradients, or --layouts and one or more such as tp2 tp2,sp,pp2"


@dataclass
class Arguments:
    """Arguments of the command."""

    flags: list[str]
    """Of the run, for one process."""
    layouts: list[ParityLayout]
    iterations: int = 3
    show_all: bool = False
    gradients: bool = False


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Read the command line. Raises ConfigError."""
    found = Arguments([], [])
    tokens = list(argv)
    while tokens:
        token = tokens.pop(0)
        if token == "--layouts":
            # A layout never begins with "--" on the command line: flags inside of one follow a comma.
            while tokens and not tokens[0].startswith("--"):
                found.layouts.append(parse_layout(tokens.pop(0)))
        elif token == "--iterations":
            text = tokens.pop(0) if tokens else ""
            if not text.isdecimal() or not 1 <= int(text) <= 1000:
                raise ConfigError(f"--iterations {text!r} is not a whole number from 1 to 1000")
            found.iterations = int(text)
        elif token == "--all":
            found.show_all = True
        elif token == "--gradients":
            found.gradients = True
        else:
            found.flags.append(token)
    if not found.layouts and not found.gradients:
        raise ConfigError(f"--layouts and --gradients are missing; {_USAGE}")
    return found


def train_share(rank: int, argv: Sequence[str], world_size: int, iterations: int) -> RankTrace:
    """Train one rank of the run, in a separate process."""
    # Imported here, in the forked process: the parent answers mistakes without loading torch.
    from megatron.training.recipes.gpt import build_gpt_recipe
    from megatron.training.verify.parity import trace_rank

    config = read_run_config(argv, {"WORLD_SIZE": str(world_size)})
    recipe = build_gpt_recipe(config)
    return trace_rank(config, recipe, rank=rank, iterations=iterations, in_detail=True)


class Comparison:
    """One configuration; layouts are run when asked for."""

    def __init__(self, arguments: Arguments, padding: Mapping[str, int], model: TransformerConfig) -> None:
        self.arguments, self.padding, self.model = arguments, padding, model
        self.reference = self.trace(parse_layout("1"))
        self.errors: list[MegatronError] = []
        """Of layouts that could not run."""

    def command_line(self, layout: ParityLayout) -> list[str]:
        """Return the flags of a run under the layout; the layout's flags come last, so that they win."""
        divisible_by = self.padding["1"] // layout.sizes["tp"]
        padding = ["--make-vocab-size-divisible-by", str(divisible_by)]
        return [*self.arguments.flags, *_SETTINGS, *padding, *layout.flags]

    def trace(self, layout: ParityLayout) -> Trace:
        """Return what one run under a layout computes. Raises MegatronError where it cannot run."""
        from megatron.training.launch.local_job import run_locally
        from megatron.training.verify.parity import join

        arguments: tuple[Any, ...] = (self.command_line(layout), layout.world_size, self.arguments.iterations)
        return join(run_locally(train_share, layout.world_size, arguments))

    def check(self, layout: ParityLayout) -> bool:
        """Run it and print what came of it; whether it is the same run."""
        from megatron.training.verify.comparison import find_largest_differences
        from megatron.training.verify.report import write_report

        title = f"{layout.text} ({layout.world_size} process{'es' if layout.world_size > 1 else ''})"
        try:
            found = self.trace(layout)
        except MegatronError as error:
            print(f"{title}: CANNOT RUN: {error}", flush=True)
            self.errors.append(error)
            kind = type(error)
            self._print_smallest_part(layout, lambda part: self._fails_with(part, kind))
            return False
        findings = self._find_differences(found)
        sizes = find_largest_differences(self.reference, found)
        measured = ", ".join(f"{what} {size:.1e}" for what, size in sizes.items())
        is_same = not findings and not found.disagreements
        print(f"{title}: {'the same run' if is_same else 'ANOTHER RUN'}; largest relative differences: {measured}")
        if not is_same:
            report = write_report(self.reference, found, findings, show_all=self.arguments.show_all)
            print(*(f"  {line}" for line in report), sep="\n", flush=True)
            self._print_smallest_part(layout, self._differs)
        return is_same

    def _find_differences(self, found: Trace) -> list[ParityFinding]:
        from megatron.training.verify.comparison import choose_tolerances, find_differences

        return find_differences(self.reference, found, choose_tolerances(self.model))

    def _print_smallest_part(self, layout: ParityLayout, still: Callable[[ParityLayout], bool]) -> None:
        if len(layout.terms) < 2:
            return

        def ask(part: ParityLayout) -> bool:
            result = still(part)
            print(f"  trying {part.text}: {'it shows, too' if result else 'it does not show'}", flush=True)
            return result

        smallest = find_smallest_part(layout, ask)
        if smallest.text == layout.text:
            print(f"  nothing of {layout.text} can be left out", flush=True)
        else:
            print(f"  the smallest part of {layout.text} that shows it: {smallest.text}", flush=True)

    def _differs(self, part: ParityLayout) -> bool:
        try:
            found = self.trace(part)
        except MegatronError:
            return False
        return bool(self._find_differences(found) or found.disagreements)

    def _fails_with(self, part: ParityLayout, kind: type[MegatronError]) -> bool:
        """A part that is refused, where the whole crashed, has not shown the crash."""
        try:
            self.trace(part)
        except MegatronError as error:
            return type(error) is kind
        return False


# Masks depend on which ranks draw them: that is not what is asked here. Adam with its usual epsilon turns gradients
# that are zero but for rounding (the bias of keys) into whole steps. Evaluation and loader processes play no part.
_SETTINGS = "--hidden-dropout 0 --attention-dropout 0 --adam-eps 1e-5 --eval-iters 0 --num-workers 0".split()


@command_line
def main() -> int:
    """Check gradients, run all layouts; 1 when one of them differs."""
    arguments = parse_arguments(sys.argv[1:])
    code = _check_gradients(arguments) if arguments.gradients else 0
    return max(code, _check_layouts(arguments)) if arguments.layouts else code


def _check_gradients(arguments: Arguments) -> int:
    words, _ = shrink(arguments.flags, {}, most_processes=1)
    print("gradients of", shlex.join(words), flush=True)
    from megatron.training.recipes.gpt import build_gpt_recipe
    from megatron.training.verify.gradient_report import report_gradients

    lines, is_sound = report_gradients(lambda: read_run_config(words, {}), build_gpt_recipe, arguments.show_all)
    print(*lines, sep="\n", flush=True)
    return 0 if is_sound else 1


def _check_layouts(arguments: Arguments) -> int:
    flags, layouts = arguments.flags, arguments.layouts
    alone = parse_layout("1")
    _refuse_layout_flags(flags)
    config = read_run_config([*flags, *_SETTINGS], {})
    padding = choose_padding([alone, *layouts], config.gpt.make_vocab_size_divisible_by)
    _check_all(flags, [alone, *layouts], padding)
    model = config.model
    if model.bf16 or model.fp16 or model.few_bits_recipe is not None:
        print(
            "note: numbers in 16 bits and fewer round: only what is off by more than a tenth is found, with scales by "
            "rank more than a half; leave --bf16, --fp8-format and the like out to see more"
        )
    print("note: without dropout, and with --adam-eps 1e-5, so that rounding stays rounding")
    print("note: a mistake that all layouts share does not show; --gradients looks for those")
    comparison = Comparison(arguments, padding, model)
    losses = (f"{loss['lm loss']:.6f}" for loss in comparison.reference.losses)
    print(f"one process, {arguments.iterations} iterations: losses", *losses, flush=True)
    outcomes = [comparison.check(layout) for layout in layouts]
    if outcomes.count(False) > len(comparison.errors):
        return 1
    for error in comparison.errors:
        report_error(error)
    return comparison.errors[0].exit_code if comparison.errors else 0


def _refuse_layout_flags(flags: Sequence[str]) -> None:
    """Raise ConfigError where the flags of the run already divide it."""
    examination = examine(flags, {})
    sizes = {name: examination.value_of(flag.removeprefix("--").replace("-", "_")) for name, flag in SIZE_FLAGS.items()}
    problems = []
    for name, flag in SIZE_FLAGS.items():
        size = sizes[name]
        # The size for experts follows from the other one where nobody gives it.
        if isinstance(size, int) and size > 1 and not (name == "etp" and size == sizes["tp"]):
            problems.append(
                f"{flag} {size} divides the run, and what is compared is one process with layouts of it: "
                f"leave it out and give --layouts {name}{size}"
            )
    if problems:
        raise ConfigError(problems)


def _check_all(flags: Sequence[str], layouts: Sequence[ParityLayout], padding: Mapping[str, int]) -> None:
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

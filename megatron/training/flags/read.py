# SPDX-License-Identifier: Apache-2.0
"""From a command line to a RunConfig: parse, refuse, derive, check, and say where every value came from.

    config = read_run_config(sys.argv[1:], os.environ)

Nothing here imports torch, opens data, or looks at devices, so that any launch script can be checked anywhere.
"""

from __future__ import annotations

import math
import re
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TextIO

from megatron.core import __version__
from megatron.core.config_base import check, fill_missing, get_settings, keep_common, names_any, unchecked
from megatron.core.errors import ConfigError
from megatron.core.setting import Setting
from megatron.training.config.container import RunConfig
from megatron.training.config.gpu_needs import describe_gpu_needs
from megatron.training.config.program import ProgramFlags
from megatron.training.config.relations import derive_across_groups
from megatron.training.config.run_groups import group_classes, groups_of_fields
from megatron.training.flags.command_line_rules import (
    PlannedFlags,
    checkpoint_problems,
    contradicting_flags,
    environment_problems,
)
from megatron.training.flags.declarations import declared_flags, program_flags
from megatron.training.flags.derive import derive, idle_notes, schedule_notes
from megatron.training.flags.elastic import add_elastic_layout
from megatron.training.flags.flag import table_flags
from megatron.training.flags.given import ParsedFlags, Problem
from megatron.training.flags.help import asked_for_help, format_help
from megatron.training.flags.parser import ExtraFlags, read_command_line
from megatron.training.flags.preset import LIST, add_preset_flags, format_presets
from megatron.training.flags.topology import add_topology
from megatron.training.flags.tuning import add_tuning_flags

_LARGEST_WORLD = 10_000_000
_SIZES = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size",
)  # fmt: skip


@dataclass(frozen=True)
class Examination:
    """A command line after parsing, deriving and checking."""

    config: RunConfig
    """The settings of the run. Where there are problems it serves to look at them only."""
    problems: tuple[Problem, ...]
    """Everything that is wrong with the settings."""
    program: ProgramFlags
    """Action to take with them."""
    planned: PlannedFlags
    """The flags that no config declares."""

    def value_of(self, dest: str) -> Any:
        """The value of any flag, by the name of its field, or upstream's where it has none."""
        if dest in groups_of_fields():
            return self.config.read(dest)
        return getattr(self.program, dest) if hasattr(self.program, dest) else self.planned[dest]


def read_run_config(
    argv: Sequence[str],
    environ: Mapping[str, str],
    extra_flags: ExtraFlags | None = None,
    *,
    trains: bool = True,
) -> RunConfig:
    """The settings of this run, or a ConfigError with every problem. --help, --version, --print-config print and exit.

    environ: the environment; of it WORLD_SIZE counts, the number of processes (default 1).
    extra_flags: adds a user's flags to the argparse parser it is given; their values are in `RunConfig.extra`.
    trains: our loop is to train with them; a program with another loop need not say how long, and may learn only
    later how many processes it has.
    """
    # Before parsing: help is wanted most where the rest of the command line is wrong.
    words = asked_for_help(argv)
    if words is not None:
        print(format_help(words, extra_flags), end="")
        raise SystemExit(0)
    if "--version" in argv:
        print(__version__)
        raise SystemExit(0)
    examination = examine(argv, environ, extra_flags, trains=trains)
    if examination.program.preset == LIST:
        print(format_presets(), end="")
        raise SystemExit(0)
    if examination.problems:
        raise ConfigError([problem.text for problem in examination.problems])
    if examination.program.print_config:
        print_settings(examination.config, sys.stdout)
        raise SystemExit(0)
    return examination.config


def examine(
    argv: Sequence[str], environ: Mapping[str, str], extra_flags: ExtraFlags | None = None, *, trains: bool = True
) -> Examination:
    """Parse, derive and check; never raises for what a user wrote."""
    parsed = ParsedFlags()
    command_line = ParsedFlags()
    _parse(argv, command_line, extra_flags)
    path = command_line.given.get("config")
    if path is not None:
        from megatron.training.flags.yaml_config import read_yaml_config

        read_yaml_config(path.value, parsed)
    # The command line is parsed first, to find --config, and merged last, to win.
    _merge(parsed, command_line)
    world_size = _world_size(environ, parsed)
    active = parsed.given.get("inprocess_active_world_size")
    if "inprocess_restart" in parsed.given and active is not None and isinstance(active.value, int):
        # The others wait. More than there are is a problem, which environment_problems() names.
        world_size = max(1, min(world_size, active.value))
    tried = parsed.given.get("dry_run_world_size")
    if tried is not None and isinstance(tried.value, int) and 1 <= tried.value <= _LARGEST_WORLD:
        # Of the job that a dry run tries, whatever this process belongs to.
        world_size = tried.value
    if not trains and "WORLD_SIZE" not in environ:
        sizes = [parsed.given[axis].value for axis in _SIZES if axis in parsed.given]
        world_size = min(_LARGEST_WORLD, math.prod(size for size in sizes if isinstance(size, int)))
    # Only now: the file may name a preset, and --load.
    add_preset_flags(parsed, world_size)
    add_tuning_flags(parsed)
    add_elastic_layout(parsed, world_size)
    add_topology(parsed)
    if "use_checkpoint_args" in parsed.given:
        from megatron.training.flags.from_checkpoint import add_checkpoint_arguments

        add_checkpoint_arguments(parsed)
    return _examine(parsed, environ, world_size, trains)


def _examine(parsed: ParsedFlags, environ: Mapping[str, str], world_size: int, trains: bool) -> Examination:
    """Derive, then let every config, their relations and the flags of coming capabilities judge the result."""
    # Read before derivation: what a user wrote and what followed from it must stay apart for notes and for sources.
    given = {dest: entry.value for dest, entry in parsed.given.items()}
    planned = PlannedFlags({flag.dest: flag for flag in table_flags()}, given)
    run, missing = _unchecked_run(given, world_size)
    notes, rules, refused = _judge(run, parsed, environ, missing, trains)
    parsed.problems += refused.values()
    if missing:
        parsed.problems += [Problem("rule", text) for text in missing.values() if not names_any(text, parsed.broken)]
        parsed.broken.update(spelling for name in missing for spelling in get_settings(type(run.model))[name].spellings)
        twin, _ = _unchecked_run(given, world_size, multiple=2)
        rules = keep_common(rules, _judge(twin, parsed, environ, missing, trains)[1])
    parsed.problems += [Problem("rule", text) for text in rules if not names_any(text, parsed.broken)]
    # After all rules: notes are about settings that are legal and have nothing to do.
    notes = [*parsed.notes, *notes, *idle_notes(run, given.keys())]
    if not rules and not parsed.problems and trains:
        notes += schedule_notes(run)
    sources = {flag.name: "default" for flag in declared_flags()}
    sources |= {entry.flag.name: entry.source for entry in parsed.given.values() if entry.flag.name in sources}
    sources["WORLD_SIZE"] = "environment" if "WORLD_SIZE" in environ else "default"
    # dict.fromkeys removes repeated sentences and keeps their order.
    config = run.with_groups(sources=sources, notes=tuple(dict.fromkeys(notes)), extra=parsed.extra)
    program = ProgramFlags(**{flag.dest: given[flag.dest] for flag in program_flags() if flag.dest in given})
    return Examination(config, tuple(dict.fromkeys(parsed.problems)), program, planned)


def _judge(
    run: RunConfig, parsed: ParsedFlags, environ: Mapping[str, str], missing: Collection[str], trains: bool
) -> tuple[list[str], list[str], dict[str, Problem]]:
    """Derive, then check every rule. Returns notes, problems, and the settings that are refused for their status, with
    the reason. missing: settings that have a stand-in, and are reported separately."""
    given = parsed.given.keys()
    notes = list(derive(run, given))
    derive_across_groups(run)
    refused = _refuse_by_status(parsed, run)
    rules = [*contradicting_flags(run, given), *checkpoint_problems(run), *environment_problems(run, environ)]
    for group in group_classes():
        config = getattr(run, group)
        # A setting that is refused for its status is judged no further.
        rules += check(config, {*refused, *missing} & vars(config).keys())
    return notes, [*rules, *run.problems(trains=trains)], refused


def _refuse_by_status(parsed: ParsedFlags, run: RunConfig) -> dict[str, Problem]:
    """Return why each setting is refused that is planned or not supported.

    What derivation has turned back into the default has no effect, and passes.
    """
    refused = {}
    for name, entry in parsed.given.items():
        problem = entry.refusal()
        # A flag of the table has no field, though a hidden one may have its name.
        if problem and (entry.value if entry.flag.owner is None else run.read(name)) != entry.flag.default:
            refused[name] = problem
    return refused


def _unchecked_run(given: Mapping[str, Any], world_size: int, multiple: int = 1) -> tuple[RunConfig, dict[str, str]]:
    """The settings as they were written, with defaults for all others, neither derived nor checked; and a sentence for
    each that must be given and is missing, which has so many times its example."""
    groups: dict[str, Any] = {name: {} for name in group_classes()}
    for flag in declared_flags():
        if flag.dest in given:
            groups[groups_of_fields()[flag.dest]][flag.dest] = given[flag.dest]
    made: dict[str, Any] = {
        name: unchecked(config_class, groups[name]) for name, config_class in group_classes().items()
    }
    missing: dict[str, str] = {}
    for config in made.values():
        config.normalize()
        missing |= fill_missing(config, multiple)
    return unchecked(RunConfig, made | {"world_size": world_size}), missing


def _parse(argv: Sequence[str], parsed: ParsedFlags, extra_flags: ExtraFlags | None) -> None:
    try:
        read_command_line(argv, parsed, extra_flags)
    except ConfigError as error:  # only a user's flag can get here
        parsed.problems += [Problem("spelling", text) for text in error.problems]


def _merge(parsed: ParsedFlags, command_line: ParsedFlags) -> None:
    parsed.given.update(command_line.given)
    parsed.problems = [*parsed.problems, *command_line.problems]
    parsed.notes += command_line.notes
    parsed.broken |= command_line.broken
    parsed.extra = command_line.extra


def _world_size(environ: Mapping[str, str], parsed: ParsedFlags) -> int:
    text = environ.get("WORLD_SIZE", "1")
    # The environment is a launcher's, and may hold anything.
    if re.fullmatch("[0-9]{1,8}", text) and 1 <= int(text) <= _LARGEST_WORLD:
        return int(text)
    # A terminal must not be handed control characters of a variable.
    shown = ascii(text[:40])
    parsed.misspelt(f"environment variable WORLD_SIZE={shown} is not a whole number from 1 to {_LARGEST_WORLD}")
    parsed.broken.add("WORLD_SIZE")
    return 1


def print_settings(config: RunConfig, out: TextIO) -> None:
    """Every value of the run with its source, one per line, under the headings of --help."""
    flags = declared_flags()
    values = {flag.name: shown_value(flag, config.read(flag.dest)) for flag in flags}
    name_width = max(map(len, values))
    value_width = min(max(map(len, values.values())), max(12, shutil.get_terminal_size().columns - name_width - 20))
    processes = f"{config.world_size} process{'es' if config.world_size > 1 else ''}"
    print(
        f"# {processes} (WORLD_SIZE, {config.sources['WORLD_SIZE']}), data-parallel size {config.data_parallel_size}",
        file=out,
    )
    for group, members in groupby(flags, key=lambda flag: flag.group):
        print(f"\n# {group}", file=out)
        for flag in members:
            value = values[flag.name]
            print(f"{flag.name:<{name_width}}  {value:<{value_width}}  {config.sources[flag.name]}", file=out)
    for name, extra in config.extra.items():
        print(f"{'--' + name.replace('_', '-'):<{name_width}}  {extra!s:<{value_width}}  script", file=out)
    for note in config.notes:
        print(f"note: {note}", file=out)
    # Whatever this machine has: the job may run on another.
    for sentence in describe_gpu_needs(config):
        print(f"note: {sentence}", file=out)


def shown_value(flag: Setting, value: Any) -> str:
    """A value as it would be typed; `-` where there is none."""
    if value is None:
        return "-"
    if flag.is_switch:
        return "true" if value else "false"
    return flag.format_value(value)

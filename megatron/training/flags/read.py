"""From a command line to a RunConfig: parse, refuse, derive, check, and say where every value came from.

    config = read_run_config(sys.argv[1:], os.environ)

Nothing here imports torch, opens data, or looks at devices, so that any launch script can be checked anywhere.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core import __version__
from megatron.core.config_base import CheckedConfig, assemble
from megatron.core.errors import ConfigError
from megatron.core.transformer.config_fields.mup import width_multiplier
from megatron.training.config.container import RunConfig, group_classes
from megatron.training.flags.checks.coming import not_yet
from megatron.training.flags.checks.every import violations
from megatron.training.flags.declarations import declared_flags
from megatron.training.flags.derive import derive
from megatron.training.flags.parser import ExtraFlags, Ledger, Problem, build_parser, known_flags, read_command_line
from megatron.training.flags.report import print_settings
from megatron.training.flags.settings import Settings

_LARGEST_WORLD = 10_000_000


@dataclass(frozen=True)
class Examination:
    """What a command line comes to."""

    settings: Settings
    config: RunConfig | None
    """The settings of the run; None where they cannot be assembled."""
    problems: tuple[Problem, ...]
    """Everything that stands against them."""


def read_run_config(
    argv: Sequence[str], environ: Mapping[str, str], extra_flags: ExtraFlags | None = None
) -> RunConfig:
    """The settings of this run, or a ConfigError with every problem. --help, --version, --print-config print and exit.

    environ: the environment; of it WORLD_SIZE counts, the number of processes (default 1).
    extra_flags: adds flags of a user's own to the argparse parser it is given; their values are in `RunConfig.extra`.
    """
    if "--help" in argv or "-h" in argv:
        build_parser(Ledger(), extra_flags).print_help()
        raise SystemExit(0)
    if "--version" in argv:
        print(__version__)
        raise SystemExit(0)
    examination = examine(argv, environ, extra_flags)
    if examination.problems or examination.config is None:
        raise ConfigError([problem.text for problem in examination.problems])
    if examination.settings.print_config:
        print_settings(examination.config, sys.stdout)
        raise SystemExit(0)
    return examination.config


def examine(argv: Sequence[str], environ: Mapping[str, str], extra_flags: ExtraFlags | None = None) -> Examination:
    """Parse, derive and check; never raises for what a user wrote."""
    ledger = Ledger()
    command_line = Ledger()
    _parse(argv, command_line, extra_flags)
    path = command_line.given.get("config")
    if path is not None:
        from megatron.training.flags.yaml_config import read_yaml_config

        read_yaml_config(path.value, ledger)
    _merge(ledger, command_line)
    if "use_checkpoint_args" in ledger.given:
        from megatron.training.flags.from_checkpoint import add_checkpoint_arguments

        add_checkpoint_arguments(ledger)
    given = {dest: entry.value for dest, entry in ledger.given.items()}
    settings = Settings(known_flags(), given, environ)
    settings.world_size = _world_size(environ, ledger)
    derive(settings)
    ledger.check_status(settings.values)
    rules = list(violations(settings))
    config, further = _assemble(settings, ledger)
    ledger.problems += [Problem("rule", text) for text in [*rules, *further] if not _follows_from(text, ledger.broken)]
    ledger.problems += [Problem("planned", text) for text in not_yet(settings)]
    return Examination(settings, config, tuple(dict.fromkeys(ledger.problems)))


def _parse(argv: Sequence[str], ledger: Ledger, extra_flags: ExtraFlags | None) -> None:
    try:
        read_command_line(argv, ledger, extra_flags)
    except ConfigError as error:  # only a flag of the user's own can get here
        ledger.problems += [Problem("spelling", text) for text in error.problems]


def _merge(ledger: Ledger, command_line: Ledger) -> None:
    ledger.given.update(command_line.given)
    ledger.problems = [*ledger.problems, *command_line.problems]
    ledger.notes += command_line.notes
    ledger.broken |= command_line.broken
    ledger.extra = command_line.extra


def _world_size(environ: Mapping[str, str], ledger: Ledger) -> int:
    text = environ.get("WORLD_SIZE", "1")
    if re.fullmatch("[0-9]{1,8}", text) and 1 <= int(text) <= _LARGEST_WORLD:
        return int(text)
    shown = ascii(text[:40])
    ledger.misspelt(f"environment variable WORLD_SIZE={shown} is not a whole number from 1 to {_LARGEST_WORLD}")
    ledger.broken.add("WORLD_SIZE")
    return 1


def _follows_from(text: str, broken: set[str]) -> bool:
    """A violation that names a flag whose value could not be read says nothing new."""
    return not broken.isdisjoint(re.findall(r"--[\w-]+|WORLD_SIZE", text))


def _assemble(s: Settings, ledger: Ledger) -> tuple[RunConfig | None, list[str]]:
    """The config objects, and what they say against their values."""
    problems: list[str] = []
    groups: dict[str, Any] = {}
    refused = {dest for dest, entry in ledger.given.items() if entry.refusal() is not None}
    for name, config_class in group_classes().items():
        values = {flag.dest: s.values[flag.dest] for flag in declared_flags() if flag.config == name}
        fields = {field.name for field in dataclasses.fields(config_class)}
        values |= {dest: value for dest, value in _computed(s).items() if dest in fields}
        if issubclass(config_class, CheckedConfig):
            groups[name], found = assemble(config_class, values, refused & fields)
            problems += found
        else:
            groups[name] = config_class(**values)
    sources = {flag.name: "default" for flag in declared_flags()}
    sources |= {entry.flag.name: entry.source for entry in ledger.given.values() if entry.flag.name in sources}
    sources["WORLD_SIZE"] = "environment" if "WORLD_SIZE" in s.environ else "default"
    config = RunConfig(
        **groups,
        world_size=s.world_size,
        data_parallel_size=s.data_parallel_size or 1,
        sources=sources,
        notes=tuple(dict.fromkeys(ledger.notes + s.notes)),
        extra=ledger.extra,
    )
    return config, problems


def _computed(s: Settings) -> dict[str, Any]:
    """Values of fields without a flag."""
    gated = s.swiglu or s.geglu or s.quick_geglu
    activations = {
        "swiglu": "silu",
        "quick_geglu": "quick_gelu",
        "squared_relu": "squared_relu",
        "openai_gelu": "gelu_tanh",
    }
    return {
        "gated_linear_unit": gated,
        "activation_func": next((name for flag, name in activations.items() if getattr(s, flag)), "gelu"),
        "bias_activation_fusion": s.bias_swiglu_fusion if gated else s.bias_gelu_fusion,
        "virtual_pipeline_model_parallel_size": s.virtual_pipeline_model_parallel_size,
        "measures_attention_logits": s.qk_clip or s.log_max_attention_logit,
        "bf16": s.bf16,
        "fp16": s.fp16,
        "width_multiplier": width_multiplier(s),
        "samples_per_step": s.micro_batch_size * (s.data_parallel_size or 1),
    }

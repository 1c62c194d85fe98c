# SPDX-License-Identifier: Apache-2.0
"""Every update rule of --optimizer: its class, the constants it reads, the parameters it takes.

A new rule is a row here. Choices of the flag, which flags have an effect, parameter groups and the optimizer itself
follow from this table, and so does the refusal where a layout cuts matrices that a rule needs whole. It loads no torch:
classes are named, not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RuleEntry:
    """Row of the table for one update rule."""

    path: str
    """module.Class in this package; `Class.from_config(config, groups)` builds the rule."""
    constants: tuple[str, ...]
    """Rules whose constants it reads: of `adam` those fields of OptimizerConfig whose names begin with `adam_`."""
    rest: Callable[[Any], str] | None = None
    """None: the rule takes every parameter. Otherwise it takes the matrices inside the network, which it needs whole,
    each matrix of a stack (the weights of experts) by itself, and this is the name of the rule for everything else:
    (OptimizerConfig) -> name."""


RULES: Mapping[str, RuleEntry] = {
    "adam": RuleEntry("update_rules.AdamW", ("adam",)),
    "sgd": RuleEntry("update_rules.SGD", ("sgd",)),
    "lion": RuleEntry("update_rules.Lion", ("lion",)),
    "muon": RuleEntry("muon.Muon", ("muon",), lambda config: config.muon_scalar_optimizer),
    # SOAP is Adam in another basis, so that it reads Adam's constants, too.
    "soap": RuleEntry("soap.Soap", ("soap", "adam"), rest=lambda config: "adam"),
}


def needs_whole_matrices(name: str) -> bool:
    """Return whether the rule of this name cannot update a part of a matrix separately."""
    return name in RULES and RULES[name].rest is not None


def reads_constants(config: Any, of: str) -> bool:
    """Return whether a run reads the constants of `of` ("adam": --adam-beta1, ...), for some of its parameters at
    least.

    config: has the fields of OptimizerConfig. A rule that is not in the table is not known to read any.
    """
    if config.optimizer not in RULES:
        return False
    entry = RULES[config.optimizer]
    names = (config.optimizer,) if entry.rest is None else (config.optimizer, entry.rest(config))
    return any(of in RULES[name].constants for name in names)

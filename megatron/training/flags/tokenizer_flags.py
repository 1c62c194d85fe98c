"""The tokenizer's flags for tools beside pretrain_gpt.py: declared, spelled and refused as there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.errors import ConfigError
from megatron.training.config.data import TokenizerConfig
from megatron.training.flags.declarations import flags_of, table_flags
from megatron.training.flags.parser import Ledger, add_flag, formers_by_name, translate

_GROUP = "tokenizer"
_FORMER = ("--legacy-tokenizer", "--tiktoken-", "--tokenizer-")


class TokenizerFlags:
    """Declares the flags to a tool's argparse parser, and reads them after it has parsed."""

    def __init__(self, parser: Any) -> None:
        self._ledger = Ledger()
        group = parser.add_argument_group(_GROUP)
        planned = [flag for flag in table_flags() if flag.group == _GROUP]
        for flag in [*flags_of(TokenizerConfig, _GROUP), *planned]:
            add_flag(group, flag, self._ledger, shown=flag.status == "works")

    def translated(self, argv: Sequence[str]) -> list[str]:
        """The command line with flags of other releases replaced by what they mean today."""
        tokens: list[str] = []
        for token in argv:
            former = formers_by_name().get(token.partition("=")[0])
            if former is None or not token.startswith(_FORMER):
                tokens.append(token)
            else:
                tokens += translate(former, token.split("=", 1)[1:], self._ledger)
        return tokens

    def config(self) -> TokenizerConfig:
        """The settings that the command line gave. Raises ConfigError with every problem."""
        refusals = [entry.refusal() for entry in self._ledger.given.values()]
        problems = [*self._ledger.problems, *(problem for problem in refusals if problem is not None)]
        if problems:
            raise ConfigError([problem.text for problem in problems])
        return TokenizerConfig(**{dest: entry.value for dest, entry in self._ledger.given.items()})

    @property
    def notes(self) -> list[str]:
        """Sentences for the user, about flags of other releases."""
        return self._ledger.notes

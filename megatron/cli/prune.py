# SPDX-License-Identifier: Apache-2.0
"""Make a smaller model from a trained one: fewer layers, heads and channels, those that matter least on some texts.

    python -m megatron prune --load trained --save pruned --data texts.jsonl --num-layers 16 --ffn-hidden-size 2048

What is not given stays. The result is a checkpoint of weights, which --pretrained-checkpoint begins a run with; by
itself it is a poor model, and learns again from the one that it came from (docs/fine_tuning.md). The pruned model's
logits are compared with the whole model's, whose removed parts are zero, before the result has its name.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.core.errors import ConfigError, DataError, command_line
from megatron.training.flags.argument import ProgramParser, path

if TYPE_CHECKING:
    from megatron.core.post_training.pruning import ModelSizes

_WIDTHS = {
    "num_layers": "layers",
    "hidden_size": "channels between layers (models with RMSNorm)",
    "ffn_hidden_size": "inner channels of each MLP",
    "num_attention_heads": "query heads",
    "num_query_groups": "groups of query heads with a common key and value",
}
_LONGEST = 2048


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line. A mistake in it raises ConfigError."""
    parser = ProgramParser(__doc__, see="prune --help")
    add = parser.add_argument
    add("--load", metavar="DIR", required=True, type=path, help="directory of checkpoints, or one iter_ directory")
    add("--ckpt-step", metavar="N", type=int, help="iteration to load (the latest)")
    add("--save", metavar="DIR", required=True, type=path, help="directory to make, for the pruned checkpoint")
    add("--data", metavar="FILE", required=True, type=path,
        help="JSON lines with a text, or with the messages of a conversation, in each")  # fmt: skip
    add("--samples", metavar="N", type=int, default=512, help="lines that are read (512)")
    add("--seq-length", metavar="N", type=int, default=_LONGEST, help=f"tokens of each that are read ({_LONGEST})")
    for name, text in _WIDTHS.items():
        add(f"--{name.replace('_', '-')}", metavar="N", type=int, help=f"{text} that stay (all)")
    arguments = parser.parse_args(argv)
    for name in ("samples", "seq_length", *_WIDTHS):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be at least 1")
    if all(getattr(arguments, name) is None for name in _WIDTHS):
        raise ConfigError("nothing would be removed; give --num-layers, --ffn-hidden-size or another size")
    return arguments


def choose_sizes(arguments: argparse.Namespace, full: ModelSizes) -> ModelSizes:
    """The sizes that were asked for. Raises ConfigError for those that the model does not have."""
    from megatron.core.post_training.pruning import ModelSizes

    asked = {name: getattr(arguments, name) for name in _WIDTHS}
    if asked["num_query_groups"] is None and full.heads == full.groups:
        asked["num_query_groups"] = asked["num_attention_heads"]  # no two heads share a key
    if asked["num_attention_heads"] is None and asked["num_query_groups"] is not None:
        asked["num_attention_heads"] = full.heads // full.groups * asked["num_query_groups"]
    names = ("layers", "hidden", "ffn", "heads", "groups")
    has = {flag: getattr(full, name) for flag, name in zip(_WIDTHS, names, strict=True)}
    found = {name: has[name] if value is None else value for name, value in asked.items()}
    for name, value in found.items():
        if value > has[name]:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: the model has {has[name]}; give at most that")
    heads, groups = found["num_attention_heads"], found["num_query_groups"]
    if heads % groups or heads // groups > full.heads // full.groups:
        raise ConfigError(
            f"--num-attention-heads {heads} cannot be {groups} groups of up to {full.heads // full.groups} heads each; "
            f"give a multiple of {groups}, or --num-query-groups"
        )
    layers, hidden, ffn, heads, groups = found.values()
    return ModelSizes(layers, hidden, ffn, heads, groups, full.head_width, full.is_gated)


def read_samples(file: Path, count: int, longest: int, tokenizer: Any) -> list[list[int]]:
    """Tokens of the first lines of a file. Raises DataError for a line that has neither a text nor messages, and
    StorageError for a file that cannot be read."""
    from megatron.core.datasets.sft_dataset import ConversationFile, are_messages

    lines, samples = ConversationFile(str(file)), list[list[int]]()
    for index in range(min(count, len(lines))):
        content = lines.line(index)
        if are_messages(messages := content.get("messages")):
            tokens = tokenizer.apply_chat_template(messages)
        elif isinstance(text := content.get("text"), str):
            tokens = tokenizer.tokenize(text)
        else:
            raise DataError(f'{lines.place(index)}: has neither "text" nor "messages" with a role each; write one')
        samples.append(tokens[:longest])
    samples = [tokens for tokens in samples if tokens]
    if not samples:
        raise DataError(f"--data {file} has only empty texts")
    return samples


@command_line
def main() -> int:
    """Read the command line, measure, write, compare."""
    arguments = parse_arguments(sys.argv[1:])
    # torch is loaded only now: --help and a mistyped flag need none.
    from megatron.cli.pruning import PruningSource, prune_checkpoint

    source = PruningSource(arguments.load, arguments.ckpt_step)
    wanted = choose_sizes(arguments, source.sizes)
    samples = read_samples(arguments.data, arguments.samples, arguments.seq_length, source.whole.tokenizer)
    print(prune_checkpoint(source, wanted, samples, arguments.save))
    return 0

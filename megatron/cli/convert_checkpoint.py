# SPDX-License-Identifier: Apache-2.0
"""Convert checkpoints by upstream's command line.

    python tools/checkpoint/convert.py --model-type GPT --loader core --saver core --load-dir DIR --save-dir DIR \
        --target-tensor-parallel-size 2 --target-pipeline-parallel-size 2

| --loader                      | reads                                                           |
|-------------------------------|-----------------------------------------------------------------|
| core, mcore, megatron         | a checkpoint of ours, or of upstream's: torch_dist or torch     |
| llama_mistral, mixtral_hf, hf | a Hugging Face directory                                        |

| --saver                       | writes                                                          |
|-------------------------------|-----------------------------------------------------------------|
| core, mcore, megatron         | upstream's torch format: a file for each rank, weights alone    |
| torch_dist                    | our format, which has no layout                                 |
| hf                            | a Hugging Face directory                                        |

What does the work is python -m megatron.bridge.convert. The state of the optimizer is left out where the format
changes; pretrain_gpt.py --load DIR --ckpt-convert-format keeps it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from megatron.core.errors import ConfigError, MegatronError, command_line
from megatron.hf.convert import convert, parse_arguments
from megatron.training.flags.argument import ProgramParser

_OURS = ("core", "mcore", "megatron")
LOADERS = dict.fromkeys(_OURS, "megatron") | dict.fromkeys(("llama_mistral", "mixtral_hf", "hf"), "hf")
SAVERS = dict.fromkeys((*_OURS, "torch_dist"), "megatron") | {"hf": "hf"}
REFUSED = {
    "legacy": "the layers before Megatron-Core's are not read",
    "llava_mcore": "models of images are not read",
    "hf_llava": "models of images are not written",
}
IGNORED = ("--megatron-path", "--max-queue-size", "--model-size", "--position-embedding-type", "--tokenizer-model",
           "--loader-transformer-impl", "--saver-transformer-impl", "--true-vocab-size", "--vocab-file")  # fmt: skip
"""Of upstream's programs: what the files say themselves, and how its two processes talk to each other."""
_NAMES_HERE = {
    "--input-path": "--load-dir",
    "--output-path": "--save-dir",
    "--target-tp": "--target-tensor-parallel-size",
    "--target-pp": "--target-pipeline-parallel-size",
    "--tensor-model-parallel-size": "--target-tensor-parallel-size",
    "--pipeline-model-parallel-size": "--target-pipeline-parallel-size",
}
"""Names on this command line of flags that an error of the conversion may name."""


def translate(argv: Sequence[str]) -> list[str]:
    """The command line of python -m megatron.bridge.convert. A mistake in ours raises ConfigError."""
    parser = ProgramParser(__doc__, see="python tools/checkpoint/convert.py --help")
    add = parser.add_argument
    add("--model-type", required=True, help="GPT")
    add("--loader", default="core", help=", ".join(LOADERS))
    add("--saver", default="core", help=", ".join(SAVERS))
    add("--load-dir", metavar="DIR", required=True)
    add("--save-dir", metavar="DIR", required=True)
    add("--target-tensor-parallel-size", metavar="N", default="1")
    add("--target-pipeline-parallel-size", metavar="N", default="1")
    add("--target-expert-parallel-size", metavar="N", default="1", help="1: experts are not divided here")
    add("--checkpoint-type", default="hf", help="hf")
    add("--no-checking", action="store_true", help="do not compare the result with the source")
    for name in ("--bf16", "--fp16"):
        add(name, action="store_true", help="no effect: weights keep their number format")
    for name in IGNORED:
        add(name, metavar="TEXT", help="no effect: the files say it")
    given = parser.parse_args(argv)
    if given.model_type != "GPT":
        raise ConfigError(f"--model-type {given.model_type} is not converted; give GPT")
    for name, table in (("loader", LOADERS), ("saver", SAVERS)):
        value = getattr(given, name)
        if value not in table:
            reason = f": {REFUSED[value]}" if value in REFUSED else ""
            raise ConfigError(f"--{name} {value} is not known{reason}; give one of {', '.join(table)}")
    if given.checkpoint_type != "hf":
        raise ConfigError(f"--checkpoint-type {given.checkpoint_type} is not read; give a directory of the type hf")
    if given.target_expert_parallel_size != "1":
        raise ConfigError(
            f"--target-expert-parallel-size {given.target_expert_parallel_size} is not written here; use "
            "pretrain_gpt.py --ckpt-convert-format torch with --expert-model-parallel-size"
        )
    target = SAVERS[given.saver]
    made = ["--source", LOADERS[given.loader], "--target", target, "--input-path", given.load_dir,
            "--output-path", given.save_dir]  # fmt: skip
    if target == "megatron":
        made += ["--target-tp", given.target_tensor_parallel_size, "--target-pp", given.target_pipeline_parallel_size]
        made += ["--ckpt-format", "torch_dist" if given.saver == "torch_dist" else "torch"]
    return made + ["--no-verify"] * given.no_checking


@command_line
def main() -> int:
    """Translate the command line and convert."""
    try:
        convert(parse_arguments(translate(sys.argv[1:])))
    except ConfigError as error:
        raise type(error)([_rename_flags(problem) for problem in error.problems]) from error
    except MegatronError as error:
        raise type(error)(_rename_flags(str(error))) from error
    return 0


def _rename_flags(text: str) -> str:
    """The text in the words of this command line."""
    # Whole flags, and none within a path.
    return re.sub(r"(?<![\w/-])--[a-z-]+(?![\w-])", lambda found: _NAMES_HERE.get(found[0], found[0]), text)

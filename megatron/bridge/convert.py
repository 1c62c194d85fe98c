# SPDX-License-Identifier: Apache-2.0
"""Convert models between Hugging Face directories and checkpoints of ours.

    python -m megatron.bridge.convert --source hf --target megatron --input-path DIR --output-path DIR
    python -m megatron.bridge.convert --source megatron --target hf --input-path DIR --output-path DIR

A checkpoint has no layout, so sizes such as --tensor-model-parallel-size are only checked against the model, but with
--ckpt-format torch: then it is upstream's format with a file for each rank of the target's layout. The result is
compared with the source, and appears under its name only when it is complete.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from megatron.bridge.own_family import read_family
from megatron.core.errors import ConfigError, command_line, say
from megatron.training.flags.parser import path
from megatron.training.recipes.families import FAMILIES
from megatron.training.recipes.family import Family

_SIZES = {
    "--tensor-model-parallel-size": "ranks that share each layer",
    "--pipeline-model-parallel-size": "stages of the pipeline",
    "--source-tp": "tensor-parallel size of the run that saved the source",
    "--source-pp": "pipeline-parallel size of the run that saved the source",
    "--target-tp": "tensor-parallel size of the run that is to load the result",
    "--target-pp": "pipeline-parallel size of the run that is to load the result",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see python -m megatron.bridge.convert --help")


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line. A mistake in it raises ConfigError."""
    parser = _Parser(prog="python -m megatron.bridge.convert", description=__doc__, allow_abbrev=False,
                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    add = parser.add_argument
    add("--source", choices=("hf", "megatron"), required=True, help="what --input-path is")
    add("--target", choices=("hf", "megatron"), required=True, help="what --output-path becomes")
    add("--input-path", metavar="DIR", type=path, required=True,
        help="Hugging Face directory, directory of checkpoints, or one iter_ directory")  # fmt: skip
    add("--output-path", metavar="DIR", type=path, required=True, help="directory to make; it must not hold anything")
    add("--ckpt-step", metavar="N", type=int, help="iteration of the source to convert (the latest)")
    add("--ckpt-format", choices=("torch_dist", "torch"), default="torch_dist",
        help="of --target megatron; torch: upstream's files of each rank, weights alone (torch_dist)")  # fmt: skip
    add("--family", metavar="FILE.py", type=path,
        help="Python file with a family of your own, FAMILY = Family(...); it is run (docs/conversion.md)")  # fmt: skip
    add("--no-verify", action="store_true", help="do not compare the result with the source")
    for name, text in _SIZES.items():
        add(name, metavar="N", type=int, help=f"{text}; checked, as a checkpoint has no layout")
    add("--traceback", action="store_true", help="show where in the program an error was found")
    arguments = parser.parse_args(argv)
    if arguments.source == arguments.target == "hf":
        raise ConfigError("--source hf --target hf converts nothing; one of the two must be megatron")
    for name in _SIZES:
        value = getattr(arguments, name[2:].replace("-", "_"))
        if value is not None and value < 1:
            raise ConfigError(f"{name} {value} must be at least 1")
    if arguments.target == "hf" and arguments.ckpt_format != "torch_dist":
        raise ConfigError("--ckpt-format torch is a format of --target megatron; leave it out")
    if arguments.source == "hf" and arguments.ckpt_step is not None:
        raise ConfigError(f"--ckpt-step {arguments.ckpt_step} chooses a checkpoint, and --source hf has none")
    return arguments


def _get_target_layout(arguments: argparse.Namespace) -> tuple[int, int]:
    tensor_ranks = arguments.target_tp or arguments.tensor_model_parallel_size or 1
    stages = arguments.target_pp or arguments.pipeline_model_parallel_size or 1
    return tensor_ranks, stages


def _list_families(arguments: argparse.Namespace) -> Sequence[Family]:
    """Those that are known, after the user's own."""
    return FAMILIES if arguments.family is None else (read_family(arguments.family), *FAMILIES)


def _from_hf(arguments: argparse.Namespace) -> None:
    from megatron.bridge.conversion import import_model, open_source
    from megatron.bridge.logits import compare_logits

    tensor_ranks, stages = _get_target_layout(arguments)
    families = _list_families(arguments)
    source = open_source(arguments.input_path, tensor_ranks=tensor_ranks, stages=stages, families=families)
    for note in source.notes:
        say(f"note: {note}")

    def check(result: Path) -> None:
        say(f"verified: every weight bit for bit; {compare_logits(arguments.input_path, result, families)}")

    verify = not arguments.no_verify
    if arguments.ckpt_format == "torch":
        # In two steps, so that what is verified is what the files are made of.
        with tempfile.TemporaryDirectory(dir=arguments.output_path.absolute().parent) as staged:
            whole = Path(staged) / "whole"
            import_model(source, whole, verify=verify, check=check if verify else None)
            _write_ranks(whole, None, arguments.output_path, tensor_ranks, stages)
        return
    import_model(source, arguments.output_path, verify=verify, check=check if verify else None)
    _note_layout(tensor_ranks, stages)


def _write_ranks(root: Path, iteration: int | None, output: Path, tensor_ranks: int, stages: int) -> None:
    from megatron.bridge.checkpoints import OpenCheckpoint
    from megatron.bridge.rank_files import note_rank_files, write_rank_files

    checkpoint = OpenCheckpoint(root, iteration)
    write_rank_files(checkpoint, output, tensor_ranks, stages)
    if (note := note_rank_files(checkpoint)) is not None:
        say(f"note: {note}")


def _to_hf(arguments: argparse.Namespace) -> None:
    from megatron.bridge.upstream_source import as_ours

    verify = not arguments.no_verify
    with as_ours(arguments.input_path, arguments.ckpt_step, arguments.output_path, verify=verify) as (root, iteration):
        _export(arguments, root, iteration)


def _export(arguments: argparse.Namespace, root: Path, iteration: int | None) -> None:
    from megatron.bridge.conversion import export_model, open_model
    from megatron.bridge.logits import compare_logits

    families = _list_families(arguments)
    model = open_model(root, iteration, families)

    def check(result: Path) -> None:
        say(f"verified: every weight bit for bit; {compare_logits(result, model.checkpoint.path, families)}")

    verify = not arguments.no_verify
    export_model(model, arguments.output_path, verify=verify, check=check if verify else None)


def _copy(arguments: argparse.Namespace) -> None:
    from megatron.bridge.checkpoints import OpenCheckpoint, copy_checkpoint, refuse_layout
    from megatron.bridge.upstream_source import as_ours, import_upstream, open_upstream

    verify, (tensor_ranks, stages) = not arguments.no_verify, _get_target_layout(arguments)
    place = (arguments.input_path, arguments.ckpt_step)
    if arguments.ckpt_format == "torch_dist" and (source := open_upstream(*place)) is not None:
        refuse_layout(source.config, tensor_ranks, stages)
        import_upstream(source, arguments.output_path, verify=verify)
        say(
            "note: weights alone; pretrain_gpt.py --load takes upstream's checkpoint as it is, with its optimizer state"
        )
        _note_layout(tensor_ranks, stages)
        return
    with as_ours(*place, arguments.output_path, verify=verify) as (root, iteration):
        checkpoint = OpenCheckpoint(root, iteration)
        refuse_layout(checkpoint.read_config(), tensor_ranks, stages)
        given, saved = (arguments.source_tp, arguments.source_pp), checkpoint.read_saved_layout()
        for name, size, found in zip(("--source-tp", "--source-pp"), given, saved, strict=True):
            if size is not None and size != found:
                say(f"note: {name} is {size}, and the checkpoint was saved with {found}; that makes no difference")
        if arguments.ckpt_format == "torch":
            _write_ranks(root, iteration, arguments.output_path, tensor_ranks, stages)
            return
        copy_checkpoint(checkpoint, arguments.output_path)
    _note_layout(tensor_ranks, stages)


def _note_layout(tensor_ranks: int, stages: int) -> None:
    if tensor_ranks * stages > 1:
        say(
            f"note: the checkpoint has no layout: it loads with tensor-parallel size {tensor_ranks} and "
            f"pipeline-parallel size {stages}, and with any other that the model can have"
        )


def convert(arguments: argparse.Namespace) -> None:
    """Do what the command line says, and print what was written. Raises ConfigError, CheckpointError, StorageError."""
    if arguments.source == "hf":
        _from_hf(arguments)
    elif arguments.target == "hf":
        _to_hf(arguments)
    else:
        _copy(arguments)
    say(f"wrote {arguments.output_path}")


@command_line
def main() -> int:
    """Read the command line, convert, print."""
    convert(parse_arguments(sys.argv[1:]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

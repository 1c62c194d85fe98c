# SPDX-License-Identifier: Apache-2.0
"""Convert models between Hugging Face directories and checkpoints of ours.

    python -m megatron.bridge.convert --source hf --target megatron --input-path DIR --output-path DIR
    python -m megatron.bridge.convert --source megatron --target hf --input-path DIR --output-path DIR

A checkpoint has no layout, so sizes such as --tensor-model-parallel-size are only checked against the model, but with
--ckpt-format torch: then it is upstream's format with a file for each rank of the target's layout. The result is
compared with the source, and appears under its name only when it is complete. Several processes share the work:

    torchrun --nproc_per_node 4 -m megatron.bridge.convert --source hf ...
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from megatron.core.errors import ConfigError, MegatronError, command_line, say
from megatron.core.paths import explain_no_directory
from megatron.hf.own_family import read_family
from megatron.training.flags.argument import path
from megatron.training.recipes.families import FAMILIES
from megatron.training.recipes.family import Family
from megatron.training.recipes.missing_families import MISSING

if TYPE_CHECKING:
    from megatron.core.process_groups_config import Group

WEIGHT_FORMATS = ("fp8-block", "fp8-tensor", "fp8-channel", "nvfp4", "mxfp4")
"""Formats of --weight-format: the first is quantised.FP8Weights, the others are compressed.CompressedWeights."""
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


class _ListFamilies(argparse.Action):
    """Print the table of families, and stop, as --help does."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        print(describe_families(FAMILIES))
        parser.exit()


def describe_families(families: Sequence[Family]) -> str:
    """A line for each type of models that converts, and for each popular one that does not; and what is exact."""
    rows = [
        (model_type, family.name, family.model_class)
        for family in families
        for model_type in (family.model_type, *family.aliases)
    ]
    known = {model_type for model_type, *_ in rows}
    missing = [(model_type, lacks) for model_type, lacks in MISSING.items() if model_type not in known]
    return "\n".join([
        *_align([("model_type", "family", "class of transformers"), *rows]), "",
        *_align([("no family", "what there is no layer or option for"), *missing]), "",
        f"{len(rows)} types convert, in both directions. Exact: every weight, bit for bit. Equal to rounding: logits,",
        "to 1e-5 of the largest in float32. A field of config.json that no flag follows is refused.",
    ])  # fmt: skip


def _align(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)) for row in rows)
    return [line.rstrip() for line in lines]


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
    add(
        "--adapter",
        action="store_true",
        help="of --target hf: only the adapters, as a directory that peft reads, instead of merged weights",
    )
    add("--fp8-weights", action="store_true", help="the same as --weight-format fp8-block")
    add("--weight-format", choices=WEIGHT_FORMATS,
        help="of --target hf: round the matrices of linear layers; fp8-block: with scales of 128 x 128, as DeepSeek-V3 "
        "has them; the others as compressed-tensors has them")  # fmt: skip
    add("--family", metavar="FILE.py", type=path,
        help="Python file with a family of your own, FAMILY = Family(...); it is run (docs/conversion.md)")  # fmt: skip
    add("--list", action=_ListFamilies, nargs=0, help="print the families that convert, and what is exact")
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
    for name in ("fp8_weights", "weight_format", "adapter"):
        if arguments.target != "hf" and getattr(arguments, name):
            raise ConfigError(f"--{name.replace('_', '-')} is a format of --target hf; leave it out")
    flag = "--fp8-weights" if arguments.fp8_weights else "--weight-format"
    if arguments.fp8_weights and arguments.weight_format not in (None, "fp8-block"):
        raise ConfigError(
            f"{flag} is --weight-format fp8-block, and {arguments.weight_format} is given; keep one of them"
        )
    arguments.weight_format = "fp8-block" if arguments.fp8_weights else arguments.weight_format
    if arguments.adapter and arguments.weight_format:
        raise ConfigError(f"--adapter writes no weights of the model; leave {flag} out")
    if arguments.source == "hf" and arguments.ckpt_step is not None:
        raise ConfigError(f"--ckpt-step {arguments.ckpt_step} chooses a checkpoint, and --source hf has none")
    return arguments


def _get_target_layout(arguments: argparse.Namespace) -> tuple[int, int]:
    tensor_ranks = arguments.target_tp or arguments.tensor_model_parallel_size or 1
    stages = arguments.target_pp or arguments.pipeline_model_parallel_size or 1
    return tensor_ranks, stages


def _list_families(arguments: argparse.Namespace) -> Sequence[Family]:
    """List the user's family, if any, and the known ones."""
    return FAMILIES if arguments.family is None else (read_family(arguments.family), *FAMILIES)


# torch and the model are imported only by what does the work: --help, and a mistake in the command line, are answered
# at once.


def _from_hf(arguments: argparse.Namespace, group: Group) -> None:
    from megatron.core.dist_checkpointing.agreement import with_everyone
    from megatron.hf.checkpoints import staged_directory
    from megatron.hf.conversion import import_model, open_source
    from megatron.hf.logits import compare_logits

    tensor_ranks, stages = _get_target_layout(arguments)
    families = _list_families(arguments)
    # On every process, because each reads its share of the files; only an error is agreed upon.
    source = with_everyone(
        group,
        lambda: open_source(arguments.input_path, tensor_ranks=tensor_ranks, stages=stages, families=families),
    )
    for note in source.notes:
        _say(group, f"note: {note}")

    def check(result: Path) -> None:
        say(f"verified: every weight bit for bit; {compare_logits(arguments.input_path, result, families)}")

    verify = not arguments.no_verify
    if arguments.ckpt_format == "torch":
        # In two steps, so that what is verified is what the files are made of.
        with staged_directory(arguments.output_path, group) as staged:
            whole = staged / "whole"
            import_model(source, whole, verify=verify, check=check if verify else None, group=group)
            _write_ranks(whole, None, arguments.output_path, tensor_ranks, stages, group)
        return
    import_model(source, arguments.output_path, verify=verify, check=check if verify else None, group=group)
    _note_layout(tensor_ranks, stages, group)


def _write_ranks(root: Path, iteration: int | None, output: Path, tensor_ranks: int, stages: int, group: Group) -> None:
    from megatron.hf.checkpoints import OpenCheckpoint
    from megatron.hf.rank_files import note_rank_files, write_rank_files

    checkpoint = OpenCheckpoint(root, iteration, group)
    write_rank_files(checkpoint, output, tensor_ranks, stages, group)
    if (note := note_rank_files(checkpoint)) is not None:
        _say(group, f"note: {note}")


def _to_hf(arguments: argparse.Namespace, group: Group) -> None:
    from megatron.core.dist_checkpointing.agreement import on_first_rank
    from megatron.hf.adapters import write_adapter
    from megatron.hf.conversion import export_model, open_model
    from megatron.hf.logits import compare_logits
    from megatron.hf.upstream_source import as_ours

    families = _list_families(arguments)
    verify, place = not arguments.no_verify, (arguments.input_path, arguments.ckpt_step)
    # Upstream's checkpoint becomes one of ours first, next to the result: only ours are converted to each family.
    with as_ours(*place, arguments.output_path, verify=verify, group=group) as (root, iteration):
        model = open_model(root, iteration, families, group)
        if arguments.adapter:
            on_first_rank(group, lambda: write_adapter(model.adapters, model.entries, arguments.output_path))
            return

        def check(result: Path) -> None:
            # Rounded weights compute other logits, by an amount that says nothing about the conversion.
            if arguments.weight_format:
                say("verified: every weight bit for bit as it is rounded")
                return
            say(f"verified: every weight bit for bit; {compare_logits(result, model.checkpoint.path, families)}")

        export_model(
            model,
            arguments.output_path,
            verify=verify,
            check=check if verify else None,
            group=group,
            weight_format=arguments.weight_format,
        )


def _to_megatron(arguments: argparse.Namespace, group: Group) -> None:
    from megatron.core.dist_checkpointing.agreement import on_first_rank, with_everyone
    from megatron.hf.checkpoints import OpenCheckpoint, copy_checkpoint, refuse_layout
    from megatron.hf.upstream_source import as_ours, import_upstream, open_upstream

    verify, sizes = not arguments.no_verify, _get_target_layout(arguments)
    place = (arguments.input_path, arguments.ckpt_step)
    source = None
    # Only as torch_dist is upstream's checkpoint written straight to where it belongs; files of ranks are made of one
    # of ours, below.
    if arguments.ckpt_format == "torch_dist":
        source = with_everyone(group, lambda: open_upstream(*place))
    if source is not None:
        refuse_layout(source.config, *sizes)
        if source.note is not None:
            _say(group, f"note: {source.note}")
        import_upstream(source, arguments.output_path, verify=verify, group=group)
        _say(
            group,
            "note: weights alone; pretrain_gpt.py --load takes upstream's checkpoint as it is, with its optimizer",
        )
        _note_layout(*sizes, group)
        return
    with as_ours(*place, arguments.output_path, verify=verify, group=group) as (root, iteration):
        checkpoint = OpenCheckpoint(root, iteration, group)
        with_everyone(group, lambda: refuse_layout(checkpoint.read_config(), *sizes))
        given, saved = (arguments.source_tp, arguments.source_pp), checkpoint.read_saved_layout()
        for name, size, found in zip(("--source-tp", "--source-pp"), given, saved, strict=True):
            # Not refused: commands for upstream's converter, which needs the right numbers, run here as they are.
            if size is not None and size != found:
                note = f"{name} is {size}, and the checkpoint was saved with {found}; that makes no difference"
                _say(group, f"note: {note}")
        if arguments.ckpt_format == "torch":
            _write_ranks(root, iteration, arguments.output_path, *sizes, group)
            return
        # A checkpoint of ours has no layout, so what is asked for is the checkpoint itself, optimizer included.
        on_first_rank(group, lambda: copy_checkpoint(checkpoint, arguments.output_path))
    _note_layout(*sizes, group)


def _note_layout(tensor_ranks: int, stages: int, group: Group) -> None:
    if tensor_ranks * stages > 1:
        _say(
            group,
            f"note: the checkpoint has no layout: it loads with tensor-parallel size {tensor_ranks} and "
            f"pipeline-parallel size {stages}, and with any other that the model can have",
        )


def _say(group: Group, sentence: str) -> None:
    if group.rank() == 0:
        say(sentence)


def convert(arguments: argparse.Namespace, group: Group | None = None) -> None:
    """Do what the command line says, and print what was written.

    group: processes that all call this and share the work. Raises ConfigError, CheckpointError, StorageError on all.
    """
    if group is None:
        from megatron.hf.checkpoints import ALONE

        group = ALONE
    if problem := explain_no_directory(arguments.input_path):
        raise ConfigError(f"--input-path {arguments.input_path} {problem}; give the directory to convert")
    if arguments.source == "hf":
        _from_hf(arguments, group)
    elif arguments.target == "hf":
        _to_hf(arguments, group)
    else:
        _to_megatron(arguments, group)
    _say(group, f"wrote {arguments.output_path}")


@contextlib.contextmanager
def _joined_job() -> Iterator[Group]:
    """Return the group of processes that torchrun has started; without it only this one."""
    import torch.distributed as dist

    from megatron.hf.checkpoints import ALONE

    if not dist.is_torchelastic_launched():
        yield ALONE
        return
    # Objects and host memory travel; a conversion needs no GPU where there is one.
    dist.init_process_group("gloo")
    try:
        group = dist.group.WORLD
        yield ALONE if group is None or group.size() == 1 else group
    finally:
        dist.destroy_process_group()


@command_line
def main() -> int:
    """Read the command line, convert, print."""
    arguments = parse_arguments(sys.argv[1:])
    with _joined_job() as group:
        try:
            convert(arguments, group)
        except MegatronError as error:
            # All processes have the same one.
            if group.rank() == 0:
                raise
            return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Will it fit, and how fast will it be? The best layouts of a model on a cluster, by one model of memory and time.

    python -m megatron plan --preset llama3-70b --gpus 64 --gpu h100
    python -m megatron plan --hf-config DIR --gpus 8 --gpu-file FILE.json --seq-length 4096 --global-batch-size 256
    python -m megatron plan --explain --gpus 64 --gpu h100 -- <the flags of pretrain_gpt.py>
    python -m megatron plan --preset llama3-70b --gpus 64 --gpu h100 --script slurm --output train.sh

Nothing is started, and no GPU is needed. Flags of pretrain_gpt.py that are given stay as they are; what they leave open
is tried: tensor, pipeline, context and expert parallelism, chunks, micro-batch and recomputation. Each layout is judged
by the rules of a run. Memory is counted tensor by tensor (docs/planning.md says within what); time is a model of
published rates, not a measurement: its order of layouts is of more worth than its seconds.
Exit code 0: a layout fits; 1: none does; 2: the flags cannot be.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence

from megatron.cli.plan_script import SCRIPTS, write_script
from megatron.cli.plan_search import LARGEST_JOB, Judge, Layout, Search, find_smallest_fit, to_json
from megatron.core.errors import ConfigError, command_line, format_bytes, say
from megatron.core.paths import write_atomically
from megatron.planner.devices import Device, find_device, read_device
from megatron.training.flags.argument import ProgramParser, path
from megatron.training.flags.read import examine
from megatron.training.recipes.hf_config import CONFIG_JSON, list_model_flags, read_model_fields

_DAY = 86400
_TOKENS_PER_BATCH = 4 << 20
_LONGEST = 8192


def read_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the program's arguments, and the flags of the training."""
    parser = ProgramParser(__doc__)
    cluster = parser.add_argument_group("cluster")
    cluster.add_argument("--gpus", type=int, required=True, metavar="N", help="of the job: its number of processes")
    cluster.add_argument("--gpu", metavar="NAME", help="v100, a100, h100, h800, h200, gh200, b200 or gb200")
    cluster.add_argument("--gpu-file", type=path, metavar="FILE.json", help="the row of a device, as probe writes it")
    cluster.add_argument("--gpus-per-node", type=int, metavar="N", help="that fast links join (default: the device's)")
    cluster.add_argument("--dp", type=int, metavar="N", help="replicas that a layout must have")
    model = parser.add_argument_group("model")
    model.add_argument("--hf-config", type=path, metavar="DIR", help="a Hugging Face directory, or its config.json")
    answer = parser.add_argument_group("answer")
    answer.add_argument("--explain", action="store_true", help="judge the layout of the flags, and no other")
    answer.add_argument("--top", type=int, default=5, metavar="N", help="layouts to show (default: 5)")
    answer.add_argument("--json", type=path, metavar="FILE", help="write all layouts, and why others were rejected")
    answer.add_argument("--train-tokens", type=float, metavar="N", help="of the training, for days and GPU hours")
    answer.add_argument("--dollars-per-gpu-hour", type=float, metavar="X", help="for the cost of these hours")
    answer.add_argument("--script", choices=SCRIPTS, help="write a launcher of the best layout")
    answer.add_argument("--output", type=path, metavar="FILE", help="of --script (default: standard output)")
    arguments, words = parser.parse_known_args(list(argv))
    for name in ("gpus", "gpus_per_node", "dp", "top"):
        value = getattr(arguments, name)
        if value is not None and not 1 <= value <= 10_000_000:
            raise ConfigError(f"--{name.replace('_', '-')} {value} cannot be; give a whole number of at least 1")
    for name in ("train_tokens", "dollars_per_gpu_hour"):
        value = getattr(arguments, name)
        # Written so that nan is refused.
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"--{name.replace('_', '-')} {value:g} cannot be; give a number above 0")
    if (arguments.gpu is None) == (arguments.gpu_file is None):
        raise ConfigError("the device is not clear: give one of --gpu NAME and --gpu-file FILE.json")
    if arguments.output is not None and arguments.script is None:
        raise ConfigError("--output is the file of --script; give --script slurm, torchrun or k8s, or leave it out")
    return arguments, [word for word in words if word != "--"]


def choose_device(arguments: argparse.Namespace) -> Device:
    """The row of the cluster's devices. Raises ConfigError."""
    row = find_device(arguments.gpu) if arguments.gpu else read_device(arguments.gpu_file)
    per_node = arguments.gpus_per_node or min(row.devices_per_node, arguments.gpus)
    return dataclasses.replace(row, devices_per_node=per_node)


def complete_flags(arguments: argparse.Namespace, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the flags of the model with stand-ins for what a plan needs and was not given; and the stand-ins."""
    flags = list(words)
    if arguments.hf_config is not None:
        file = arguments.hf_config
        file = file / CONFIG_JSON if file.is_dir() else file
        flags = [*list_model_flags(read_model_fields(file), file), *flags]

    def is_given(*names: str) -> bool:
        return any(word.partition("=")[0] in names for word in flags)

    added: list[str] = []
    if not is_given("--data-path", "--mock-data", "--train-data-path", "--data-args-path"):
        added.append("--mock-data")
    if not is_given("--tokenizer-type"):
        added += ["--tokenizer-type", "NullTokenizer"]
    if not is_given("--bf16", "--fp16") and (is_given("--preset") or arguments.hf_config is not None):
        added.append("--fp16" if arguments.gpu and arguments.gpu.lower() == "v100" else "--bf16")
    if not is_given("--lr"):
        added += ["--lr", "3e-4"]
    if not is_given("--train-iters", "--train-samples"):
        added += ["--train-iters", "1000"]
    if not is_given("--seq-length"):
        gpt = examine([*flags, *added, "--seq-length", "1"], {}, trains=False).config.gpt
        added += ["--seq-length", str(min(_LONGEST, gpt.max_position_embeddings or _LONGEST))]
    if not is_given("--global-batch-size"):
        length = examine([*flags, *added], {}, trains=False).config.data.seq_length or 1
        per_gpu = max(1, _TOKENS_PER_BATCH // length // arguments.gpus)
        added += ["--global-batch-size", str(per_gpu * arguments.gpus)]
    return [*flags, *added], added


def describe_layout(layout: Layout, gpus: int, arguments: argparse.Namespace) -> list[str]:
    """A layout's memory, time by part, and what a training costs with it."""
    assert layout.step_seconds and layout.memory_bytes and layout.step_bytes and layout.tokens_per_second
    lines = [
        f"memory: {format_bytes(layout.memory_bytes)}, of which tensors of a step {format_bytes(layout.step_bytes)}",
        f"step: {layout.step_seconds:.3g} s, MFU {layout.mfu:.1%}, {layout.tokens_per_second:,.0f} tokens/s, "
        f"{layout.tokens_per_second / gpus:,.0f} a GPU",
        "of a step: "
        + ", ".join(
            f"{part} {seconds / layout.step_seconds:.1%}"
            for part, seconds in sorted(layout.parts.items(), key=lambda item: -item[1])
            if seconds >= 0.001 * layout.step_seconds
        ),
    ]
    if arguments.train_tokens is not None:
        seconds = arguments.train_tokens / layout.tokens_per_second
        hours = seconds / 3600 * gpus
        cost = f", {hours * arguments.dollars_per_gpu_hour:,.0f} dollars" if arguments.dollars_per_gpu_hour else ""
        lines.append(f"{arguments.train_tokens:g} tokens: {seconds / _DAY:,.1f} days, {hours:,.0f} GPU hours{cost}")
    return lines


def format_table(layouts: Sequence[Layout], gpus: int) -> str:
    """The layouts in a table."""
    header = f"{'TP':>3}{'PP':>4}{'chunks':>7}{'CP':>4}{'EP':>4}{'DP':>6}{'mb':>4}  {'recomputed':<11}{'memory':>11}"
    lines = [f"{header}{'s/step':>9}{'MFU':>7}{'tokens/s/GPU':>14}"]
    for layout in layouts:
        assert layout.step_seconds and layout.memory_bytes and layout.tokens_per_second
        lines.append(
            f"{layout.tp:>3}{layout.pp:>4}{layout.chunks:>7}{layout.cp:>4}{layout.ep:>4}{layout.dp:>6}"
            f"{layout.micro_batch_size:>4}  {layout.recompute or '-':<11}{format_bytes(layout.memory_bytes):>11}"
            f"{layout.step_seconds:>9.3g}{layout.mfu:>7.1%}{layout.tokens_per_second / gpus:>14,.0f}"
        )
    return "\n".join(lines)


def explain(judge: Judge, flags: Sequence[str], added: Sequence[str], arguments: argparse.Namespace) -> int:
    """Judge one layout. Raises ConfigError where it is illegal."""
    layout = judge.judge(flags)
    sizes = (layout.tp, layout.pp, layout.cp)
    needed = layout.tp * layout.pp * layout.cp * (arguments.dp or 1)
    if arguments.dp is not None and needed != arguments.gpus:
        product = " x ".join(f"{axis} {size}" for axis, size in zip(("TP", "PP", "CP"), sizes, strict=True))
        layout.legal, layout.fits = False, False
        layout.why = (
            f"{product} x DP {arguments.dp} = {needed} GPUs, and --gpus says {arguments.gpus}; experts (EP "
            f"{layout.ep}) are inside of these, they do not multiply them"
        )
        layout.problems.append(layout.why)
    if arguments.json is not None:
        write_atomically(arguments.json, json.dumps(to_json(layout), indent=2) + "\n")
    if not layout.legal:
        raise ConfigError(layout.problems)
    print("\n".join([layout.name, *describe_layout(layout, arguments.gpus, arguments)]))
    print(f"it fits {judge.device.name}" if layout.fits else f"does not fit {judge.device.name}: {layout.why}")
    write_script(arguments, layout, judge.device, added)
    return 0 if layout.fits else 1


@command_line
def main() -> int:
    """Search, and print the table; the exit code says whether a layout fits."""
    arguments, words = read_arguments(sys.argv[1:])
    device = choose_device(arguments)
    flags, added = complete_flags(arguments, words)
    judge = Judge(arguments.gpus, device)
    if added:
        say(f"note: nobody has said, and the plan takes: {' '.join(added)}")
    if arguments.explain:
        return explain(judge, flags, added, arguments)
    search = Search(judge, flags, lambda text: print(f"note: {text}", file=sys.stderr, flush=True))
    tried = search.run(arguments.dp)
    fitting = [layout for layout in tried if layout.fits]
    best, rejected = fitting[: arguments.top], [*fitting[arguments.top :], *(x for x in tried if not x.fits)]
    if arguments.json is not None:
        found = {"layouts": list(map(to_json, best)), "rejected": list(map(to_json, rejected))}
        write_atomically(arguments.json, json.dumps(found, indent=2) + "\n")
    if not any(layout.legal for layout in tried):
        reasons = list(dict.fromkeys(problem for layout in tried for problem in layout.problems))
        raise ConfigError(reasons[:5] or [describe_no_division(search, arguments)])
    if not best:
        print(describe_no_fit(tried, judge, flags))
        return 1
    print(format_table(best, arguments.gpus))
    print("\n".join(["", f"the fastest: {best[0].name}", *describe_layout(best[0], arguments.gpus, arguments)]))
    print(f"flags: {' '.join(best[0].flags)}")
    for layout in best[1:]:
        print(f"{layout.name}: {layout.why}")
    near = [layout for layout in rejected if layout.legal and not layout.fits]
    if near:
        print(f"{len(near)} do not fit, such as {near[0].name}: {near[0].why}")
    write_script(arguments, best[0], device, added)
    return 0


def describe_no_division(search: Search, arguments: argparse.Namespace) -> str:
    """Say which sizes are given, none of whose divisions has as many processes."""
    given = search.list_given_sizes() + ([f"--dp {arguments.dp}"] if arguments.dp is not None else [])
    return (
        f"--gpus {arguments.gpus} cannot be divided with {', '.join(given)}; give a number of GPUs that is a multiple "
        "of their product, or leave sizes open"
    )


def describe_no_fit(tried: Sequence[Layout], judge: Judge, flags: Sequence[str]) -> str:
    """Say what comes nearest, and on how many devices the model would fit."""
    nearest = min((layout for layout in tried if layout.legal), key=lambda layout: layout.memory_bytes or 0.0)
    lines = [
        f"no layout fits {judge.gpus} x {judge.device.name}; the nearest, {nearest.name}"
        f"{', ' + nearest.recompute + ' recomputation' if nearest.recompute else ''}: {nearest.why}"
    ]
    smallest = find_smallest_fit(judge.device, judge.gpus, flags)
    if smallest is None:
        lines.append(f"nor would it fit more of them, up to {LARGEST_JOB:,}; take a device with more memory")
    else:
        processes = smallest.tp * smallest.pp * smallest.cp * smallest.dp
        lines.append(f"it would fit {processes} of them, with {smallest.name}: {' '.join(smallest.flags)}")
    return "\n".join(lines)

# SPDX-License-Identifier: Apache-2.0
"""What the planner says of runs that were published, and of the layouts that users' guides recommend.

    python -m benchmarks.planned_runs published
    python -m benchmarks.planned_runs recommended
    python -m benchmarks.planned_runs scaling

Published: Korthikanti et al., 2022 (arXiv 2205.05198, table 5; step times); Narayanan et al., 2021 (2104.04473,
table 1; TFLOP/s that count recomputation, so three quarters of them are the model's); Llama 3 (2407.21783, table 4);
MegaScale (2402.15627, table 2); DeepSeek-V3 (2412.19437, 180,000 GPU hours for a trillion tokens). What a
paper does not say is assumed, in `RUNS`, by its flags: eight chunks a stage for Llama 3, overlapped tensor
parallelism for MegaScale.
"""

from __future__ import annotations

import statistics
import sys
from typing import NamedTuple

from megatron.cli.plan_search import Judge, Layout
from megatron.core.errors import format_bytes
from megatron.planner.devices import find_device

_COMMON = "--mock-data --tokenizer-type NullTokenizer --bf16 --micro-batch-size 1 --lr 1e-4 --train-iters 1"
_GPT = "--max-position-embeddings 2048 --vocab-size 51200 --seq-length 2048"
_SELECTIVE = "--sequence-parallel --recompute-granularity selective --attention-backend unfused"
_FULL = (
    """--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --attention-backend unfused"""
)
_SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
_SIZES = {
    "22B": "--num-layers 48 --hidden-size 6144 --num-attention-heads 64",
    "175B": "--num-layers 96 --hidden-size 12288 --num-attention-heads 96",
    "530B": "--num-layers 105 --hidden-size 20480 --num-attention-heads 128",
    "1T": "--num-layers 128 --hidden-size 25600 --num-attention-heads 160",
}
_LLAMA = f"""--preset llama3.1-405b {_SHARDED} --sequence-parallel --num-virtual-stages-per-pipeline-rank 8
    --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"""
_DEEPSEEK = f"""--preset deepseek-v3 {_SHARDED} --fp8-format hybrid --fp8-recipe blockwise --seq-length 4096
    --expert-model-parallel-size 64 --moe-grouped-gemm --moe-token-dispatcher-type alltoall
    --overlap-moe-expert-parallel-comm --decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 2"""


class PublishedRun(NamedTuple):
    """A run of a paper: seconds of a step, or the TFLOP/s of the model on a GPU, whichever the paper gives."""

    name: str
    gpu: str
    gpus: int
    layout: str
    batch: int
    flags: str
    seconds: float | None = None
    tflops: float | None = None

    def predict(self) -> tuple[float, float]:
        """What the planner says, and what was published: seconds of a step."""
        device = find_device(self.gpu)
        sizes = read_sizes(self.layout)
        layout = Judge(self.gpus, device).judge(
            f"{_COMMON} {sizes} --global-batch-size {self.batch} {self.flags}".split()
        )
        assert layout.step_seconds and layout.mfu, layout.why
        if self.seconds is not None:
            return layout.step_seconds, self.seconds
        assert self.tflops is not None
        return layout.step_seconds, layout.step_seconds * layout.mfu * device.peak_flops / 1e12 / self.tflops


RUNS = (
    PublishedRun("22B, 2022", "a100", 8, "TP 8", 4, f"{_GPT} {_SIZES['22B']} {_SELECTIVE} --micro-batch-size 4", 1.10),
    PublishedRun("175B, 2022", "a100", 64, "TP 8 PP 8 x 3", 64, f"{_GPT} {_SIZES['175B']} {_SELECTIVE}", 13.75),
    PublishedRun("530B, 2022", "a100", 280, "TP 8 PP 35 x 3", 280, f"{_GPT} {_SIZES['530B']} {_SELECTIVE}", 37.83),
    PublishedRun("1T, 2022", "a100", 512, "TP 8 PP 64", 512, f"{_GPT} {_SIZES['1T']} {_SELECTIVE}", 71.49),
    PublishedRun("1T, 2021", "a100", 3072, "TP 8 PP 64", 3072, f"{_GPT} {_SIZES['1T']} {_FULL}", tflops=122.25),
    PublishedRun("530B, 2021", "a100", 2520, "TP 8 PP 35 x 3", 2520, f"{_GPT} {_SIZES['530B']} {_FULL}", tflops=122.25),
    PublishedRun("Llama 3 405B", "h100", 8192, "TP 8 PP 16", 2048, f"{_LLAMA} --seq-length 8192", tflops=430),
    PublishedRun("Llama 3 405B", "h100", 16384, "TP 8 PP 16", 2048, f"{_LLAMA} --seq-length 8192", tflops=400),
    PublishedRun(
        "Llama 3 405B, 131,072", "h100", 16384, "TP 8 PP 16 CP 16", 128,
        f"{_LLAMA} --seq-length 131072 --cp-comm-type all_gather", tflops=380,
    ),
    PublishedRun(
        "175B, MegaScale", "a100", 12288, "TP 8 PP 8 x 6", 6144,
        f"{_GPT} {_SIZES['175B']} {_SHARDED} --sequence-parallel --tp-comm-overlap", tflops=0.552 * 312,
    ),
    PublishedRun("DeepSeek-V3", "h800", 2048, "PP 16", 15360, _DEEPSEEK, 15360 * 4096 * 180e3 * 3600 / 1e12 / 2048),
)  # fmt: skip

_UNEVEN = "--seq-length 8192 --decoder-last-pipeline-num-layers 14"
_TRILLION = f"{_GPT} {_SIZES['1T']}"
RECOMMENDED = (
    ("7B", 8, "TP 2", 4, 256, "--preset llama2-7b --seq-length 4096"),
    ("70B", 64, "TP 8 PP 2", 4, 1024, "--preset llama2-70b --seq-length 4096"),
    ("175B", 256, "TP 8 PP 8", 4, 1536, f"{_GPT} {_SIZES['175B']}"),
    ("1T", 1024, "TP 8 PP 16", 8, 3072, _TRILLION),
    ("7B", 8, "TP 1", 8, 256, "--preset llama2-7b --seq-length 4096"),
    ("13B", 8, "TP 2", 4, 256, "--preset llama2-13b --seq-length 4096"),
    ("70B", 32, "TP 4 PP 2", 4, 1024, "--preset llama2-70b --seq-length 4096"),
    ("175B", 128, "TP 8 PP 4", 4, 1536, f"{_GPT} {_SIZES['175B']}"),
    ("405B", 256, "TP 8 PP 8", 4, 1024, f"--preset llama3.1-405b {_UNEVEN}"),
    ("7B", 8, "TP 1", 8, 256, "--preset llama2-7b --seq-length 4096"),
    ("13B", 8, "TP 2", 4, 256, "--preset llama2-13b --seq-length 4096"),
    ("70B", 64, "TP 4 PP 4", 4, 1024, "--preset llama2-70b --seq-length 4096"),
    ("405B", 128, "TP 8 PP 8 CP 2", 2, 1024, f"--preset llama3.1-405b {_UNEVEN}"),
)  # fmt: skip
"""Model, GPUs, layout, data parallelism, batch and flags of the 13 layouts that guides recommend, as they give them."""
_AXES = {
    "TP": "--tensor-model-parallel-size", "PP": "--pipeline-model-parallel-size", "CP": "--context-parallel-size",
    "x": "--num-virtual-stages-per-pipeline-rank",
}  # fmt: skip


def read_sizes(layout: str) -> str:
    """`TP 8 PP 8 x 3` as flags."""
    words = layout.split()
    return " ".join(f"{_AXES[axis]} {size}" for axis, size in zip(words[::2], words[1::2], strict=True))


def judge_recommended(gpus: int, layout: str, replicas: int, batch: int, flags: str) -> tuple[Layout, int]:
    """The layout on as many H100 as its sizes multiply out to, and that number."""
    words = layout.split()
    needed = replicas
    for size in words[1::2]:
        needed *= int(size)
    more = " --sequence-parallel" if "TP 1" not in layout else ""
    text = f"{_COMMON} {read_sizes(layout)} --global-batch-size {batch} {flags} {_SHARDED}{more}"
    return Judge(needed, find_device("h100")).judge(text.split()), needed


def show_published() -> list[str]:
    """A line for each published run, and the median error."""
    lines = [f"{'run':<22} {'GPUs':>10} {'layout':<16} {'published':>10} {'predicted':>10} {'error':>7}"]
    errors = []
    for run in RUNS:
        predicted, published = run.predict()
        errors.append(abs(predicted / published - 1))
        lines.append(
            f"{run.name:<22} {run.gpus:>5} {run.gpu} {run.layout:<16} {published:>8.2f} s {predicted:>8.2f} s "
            f"{predicted / published - 1:>+7.1%}"
        )
    return [*lines, f"median of the errors: {statistics.median(errors):.1%}"]


def show_recommended() -> list[str]:
    """A line for each recommended layout."""
    lines = [f"{'model':<6} {'GPUs':>5}  {'layout':<21} {'memory':>9}  {'fits':<5} {'MFU':>6}  tokens/s/GPU"]
    for model, gpus, layout, replicas, batch, flags in RECOMMENDED:
        found, needed = judge_recommended(gpus, layout, replicas, batch, flags)
        assert found.legal and found.memory_bytes and found.mfu and found.tokens_per_second, found.why
        wrong = "" if needed == gpus else f"  not {gpus} GPUs: {layout} DP {replicas} are {needed}"
        lines.append(
            f"{model:<6} {needed:>5}  {layout + f' DP {replicas}':<21} {format_bytes(found.memory_bytes):>9}  "
            f"{'yes' if found.fits else 'no':<5} {found.mfu:>6.1%}  {found.tokens_per_second / needed:>12,.0f}{wrong}"
        )
    return lines


def judge_scaled(gpus: int, batch: int) -> Layout:
    """Llama 2 70B on so many H100, TP 4 and PP 4, the rest replicas."""
    flags = f"{_COMMON} {read_sizes('TP 4 PP 4')} --global-batch-size {batch} --preset llama2-70b --seq-length 4096"
    return Judge(gpus, find_device("h100")).judge(f"{flags} {_SHARDED} --sequence-parallel".split())


def show_scaling() -> list[str]:
    """A line for each size of a cluster: with a batch that grows with it, and with one that does not."""
    lines = [f"{'GPUs':>5} {'batch':>6} {'MFU':>7} {'batch':>7} {'MFU':>7}"]
    for gpus in (64, 256, 1024, 4096):
        grown, fixed = judge_scaled(gpus, 2 * gpus), judge_scaled(gpus, 1024)
        assert grown.mfu and fixed.mfu, (grown.why, fixed.why)
        lines.append(f"{gpus:>5} {2 * gpus:>6} {grown.mfu:>7.1%} {1024:>7} {fixed.mfu:>7.1%}")
    return lines


if __name__ == "__main__":
    shown = {"published": show_published, "recommended": show_recommended, "scaling": show_scaling}
    print("\n".join(shown[sys.argv[1]]()))

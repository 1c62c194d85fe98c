# SPDX-License-Identifier: Apache-2.0
"""Random models under random layouts: is each the run that one process would make?

A case is a function of its seed: a model of odd sizes, an optimizer, a layout of two to eight processes and options of
the layers, of memory and of communication. It is trained for some iterations under the layout and on one process, and
every loss that is logged has to agree. What the settings' own rules refuse is counted apart: a refusal is right when it
is found from the command line alone. Everything else is a fault: other losses, a refusal after launch, a traceback, a
process that died, a run that does not end.
"""

from __future__ import annotations

import atexit
import functools
import math
import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.errors import ConfigError
from megatron.training.flags.read import read_run_config
from megatron.training.recipes.gpt import build_gpt_recipe
from megatron.training.verify.parity import RankTrace, trace_rank
from tests.parallel.harness import WorkerError, run_distributed
from tests.parallel.small_training import own_rank
from tests.trial.verdict import Verdict

ITERATIONS = 8
LIMIT_SECONDS = 600.0
# Relative difference of a loss. Lion moves every weight by the sign of its mean gradient, so that rounding decides the
# direction of a weight whose gradient is nothing but rounding.
TOLERANCE = {"lion": 1e-4}
USUAL_TOLERANCE = 1e-5


@dataclass
class LayoutCase:
    """One command line in two parts: the model and its training, and the layout."""

    seed: int
    sizes: dict[str, int]
    """Axis -> processes."""
    model: list[str] = field(default_factory=list)
    layout: list[str] = field(default_factory=list)
    padding: list[str] = field(default_factory=list)
    """Gives one process as many rows of padding in its vocabulary as the layout has: they take part in the softmax."""
    optimizer: str = "adam"

    @property
    def world_size(self) -> int:
        """The number of processes of the layout."""
        return self.sizes["tp"] * self.sizes["cp"] * self.sizes["pp"] * self.sizes["dp"]

    @property
    def divided(self) -> list[str]:
        """The command line under the layout."""
        return [*self.model, *axis_flags(self.sizes), *self.layout]

    def layout_text(self) -> str:
        """The layout in a few letters, and its flags."""
        axes = ",".join(f"{axis}{size}" for axis, size in self.sizes.items() if size > 1)
        return " ".join([axes, *self.layout])

    def command(self) -> str:
        """The command that repeats the case by hand, with random weights and mock data as here."""
        flags = " ".join(self.divided)
        return (
            f"python -m torch.distributed.run --standalone --nproc_per_node {self.world_size} pretrain_gpt.py {flags}"
        )


def axis_flags(sizes: dict[str, int]) -> list[str]:
    """The flags of the axes that have any."""
    names = {
        "tp": "tensor-model",
        "cp": "context",
        "pp": "pipeline-model",
        "ep": "expert-model",
        "etp": "expert-tensor",
    }
    # Experts are divided like the other layers unless a size says otherwise, also when it is 1.
    said = [axis for axis, size in sizes.items() if axis in names and (size > 1 or axis == "etp")]
    return [f"--{names[axis]}-parallel-size={sizes[axis]}" for axis in said]


# ---- drawing a case


class Draw:
    """Random choices that add flags."""

    def __init__(self, seed: int, what: str = "layout") -> None:
        self.random = random.Random(f"{what} {seed}")
        self.flags: list[str] = []

    def chance(self, probability: float) -> bool:
        """Whether something happens."""
        return self.random.random() < probability

    def one(self, *choices: Any) -> Any:
        """One of them."""
        return self.random.choice(choices)

    def maybe(self, probability: float, *flags: str) -> None:
        """Add one of the flags (several words, separated by blanks), or none."""
        if self.chance(probability):
            self.flags += self.one(*flags).split()


def draw_case(seed: int) -> LayoutCase:
    """The case of this seed."""
    draw = Draw(seed)
    sizes = _draw_sizes(draw)
    experts = draw.chance(0.35)
    case = LayoutCase(seed, sizes)
    if experts:
        ranks = sizes["tp"] * sizes["cp"] * sizes["dp"]
        sizes["ep"] = draw.one(*[n for n in (1, 2, 3, 4) if (sizes["cp"] * sizes["dp"]) % n == 0])
        sizes["etp"] = draw.one(*[n for n in {1, sizes["tp"]} if ranks % (n * sizes["ep"]) == 0])
    schedule = draw.one("1f1b", "1f1b", "1f1b", "interleaved", "interleaved", "gpipe", "zb-h1", "zb-v")
    virtual = {"interleaved": draw.one(2, 3), "zb-v": 2}.get(schedule, 1) if sizes["pp"] > 1 else 1
    a2a = sizes["cp"] > 1 and draw.chance(0.3)
    layers = sizes["pp"] * virtual * (draw.one(1, 2) if sizes["pp"] * virtual <= 4 else 1)
    case.model += _draw_model(draw, sizes, max(layers, 2), a2a)
    multiple = draw.one(1, 8, 128)
    case.model.append(f"--make-vocab-size-divisible-by={multiple}")
    case.padding = [f"--make-vocab-size-divisible-by={multiple * sizes['tp']}"]
    if experts:
        case.model += _draw_experts(draw, sizes)
    case.optimizer = draw.one(*["adam"] * 6, "sgd", "lion", "muon", "soap")
    case.model += _draw_training(draw, sizes, case.optimizer, virtual)
    case.layout = _draw_layout(draw, sizes, schedule, virtual, a2a, experts)
    _make_latent(case)
    _make_hybrid(case)
    _pack_documents(case)
    return case


def _draw_sizes(draw: Draw) -> dict[str, int]:
    while True:
        sizes = {"tp": draw.one(1, 1, 2, 2, 3, 4), "cp": draw.one(1, 1, 1, 2, 3), "pp": draw.one(1, 1, 2, 3, 4)}
        sizes["dp"] = draw.one(1, 2, 2, 3, 4)
        if 2 <= sizes["tp"] * sizes["cp"] * sizes["pp"] * sizes["dp"] <= 8:
            return sizes


def _draw_model(draw: Draw, sizes: dict[str, int], layers: int, a2a: bool) -> list[str]:
    tp, cp = sizes["tp"], sizes["cp"]
    # Heads, and the width behind them, are multiples of what divides them, and of nothing else.
    divides = tp * (cp if a2a else 1)
    heads = divides * draw.one(*[n for n in (1, 2, 3, 5) if divides * n >= 2])
    groups = draw.one(*[n for n in range(1, heads + 1) if heads % n == 0 and n % divides == 0])
    head_size = draw.one(6, 8, 10, 14)
    own_width = draw.chance(0.25)
    hidden = 2 * tp * draw.one(7, 9, 11) if own_width else heads * head_size
    length = 2 * cp * tp * draw.one(*[n for n in (1, 2, 3, 5) if 8 <= 2 * cp * tp * n <= 48])
    draw.flags = [
        f"--num-layers={layers}", f"--hidden-size={hidden}", f"--num-attention-heads={heads}", f"--seq-length={length}",
        f"--max-position-embeddings={length}", f"--ffn-hidden-size={tp * draw.one(5, 11, 16, 24)}",
        f"--vocab-size={draw.one(61, 125, 251, 547, 1009)}",
        "--hidden-dropout=0", "--attention-dropout=0",
    ]  # fmt: skip
    if own_width:
        draw.flags.append(f"--kv-channels={head_size}")
    if groups < heads:
        draw.flags += ["--group-query-attention", f"--num-query-groups={groups}"]
    if draw.chance(0.6):
        draw.flags += ["--position-embedding-type=rope"]
        draw.maybe(
            0.2,
            "--rotary-percent=0.5" if head_size % 4 == 0 else "--rotary-interleaved",
            "--rotary-base=500000",
            "--use-rope-scaling",
        )
    draw.maybe(0.5, "--normalization=RMSNorm")
    draw.maybe(0.2, "--apply-layernorm-1p", "--norm-epsilon=1e-3")
    draw.maybe(0.5, "--swiglu", "--squared-relu", "--geglu", "--quick-geglu", "--openai-gelu")
    draw.maybe(0.4, "--disable-bias-linear", "--disable-bias-linear --add-qkv-bias", "--add-qkv-bias")
    draw.maybe(0.4, "--untie-embeddings-and-output-weights")
    draw.maybe(0.3, "--qk-layernorm", "--qk-l2-norm", "--attn-logit-softcapping=20", "--attention-output-gate")
    draw.maybe(0.2, "--parallel-residual", "--norm-placement=both", "--residual-multiplier=0.5", "--logit-multiplier=2")
    draw.maybe(0.15, "--window-size=7,0", "--softmax-type=learnable", "--final-logit-softcapping=30")
    draw.maybe(0.15, "--init-method-xavier-uniform", "--embedding-init-method-std=0.1")
    draw.maybe(0.2, "--cross-entropy-loss-fusion", "--no-bias-dropout-fusion", "--attention-softmax-in-fp32")
    return draw.flags


# What latent attention does not go with.
_OF_OTHER_ATTENTION = (
    "--group-query-attention", "--num-query-groups", "--kv-channels", "--qk-l2-norm", "--attention-output-gate",
    "--add-qkv-bias", "--rotary-interleaved", "--use-rope-scaling", "--rotary-percent", "--position-embedding-type",
)  # fmt: skip


def _make_latent(case: LayoutCase) -> None:
    """Give some cases latent attention."""
    # Choices of its own, so that all other cases stay what they are.
    draw = Draw(case.seed, "latent")
    if not draw.chance(0.2):
        return
    case.model[:] = [flag for flag in case.model if flag.split("=")[0] not in _OF_OTHER_ATTENTION]
    plain, rotated = draw.one(3, 5, 8), draw.one(2, 4, 6)
    draw.flags = [
        "--multi-latent-attention", "--position-embedding-type=rope", f"--kv-lora-rank={draw.one(5, 9, 16)}",
        f"--qk-head-dim={plain}", f"--qk-pos-emb-head-dim={rotated}",
        f"--v-head-dim={draw.one(3, plain + rotated, 15)}",
    ]  # fmt: skip
    draw.maybe(0.6, f"--q-lora-rank={draw.one(7, 12)}")
    draw.maybe(0.4, "--rope-type=rope", "--rotary-scaling-factor=4 --mscale=0.8 --mscale-all-dim=0.9")
    draw.maybe(0.5, "--qk-layernorm" if "--qk-layernorm" not in case.model else "--no-rope-fusion")
    case.model += draw.flags
    if "--recompute-granularity=selective" in case.layout and "--recompute-modules" not in case.layout:
        case.layout += ["--recompute-modules", *draw.one(["mla_up_proj"], ["mla_up_proj", "core_attn"])]


def _make_hybrid(case: LayoutCase) -> None:
    """Give some cases layers of letters, with cuts and with further tokens that are predicted."""
    draw, sizes = Draw(case.seed, "hybrid"), case.sizes
    flags = {flag.split("=")[0]: flag for flag in case.model}
    pieces = int(flags["--seq-length"].split("=")[1]) // (2 * sizes["cp"])
    # A convolution reads three tokens before each piece.
    if not draw.chance(0.35) or "--parallel-residual" in flags or (sizes["cp"] > 1 and pieces < 3):
        return
    parts = [flag for flag in case.layout if flag.startswith("--num-virtual-stages-per-pipeline-rank=")]
    case.layout[:] = [flag for flag in case.layout if flag not in parts]
    segments = sizes["pp"] * (int(parts[0].split("=")[1]) if parts else 1)
    attention = "+" if "--multi-latent-attention" in flags else "*"
    kinds = f"MGK{attention}-" + ("E" if "--num-experts" in flags else "")

    def letters(count: int) -> str:
        return "".join(draw.random.choices(kinds, k=count))

    stages = [letters(draw.one(0, 1, 2, 3)) for _ in range(segments)]
    is_even = "--pipeline-schedule=zb-v" in case.layout or (not parts and draw.chance(0.5))
    if is_even:
        stages = [letters(2 * sizes["pp"])]
    # What the other flags are about is in the model.
    stages[0] += "".join(kind for kind in f"{attention}E" if kind in kinds)
    if is_even:
        stages[0] += letters(-len(stages[0]) % (2 * sizes["pp"]))
    prediction = f"/{letters(2)}" * draw.one(0, 0, 1, 2)
    groups, keys = sizes["tp"] * draw.one(1, 3), sizes["tp"] * draw.one(1, 2, 3)
    case.model[:] = [flag for flag in case.model if flag.split("=")[0] not in ("--num-layers", "--moe-layer-freq")]
    if prediction:
        case.model[:] = [flag for flag in case.model if not flag.startswith("--position-embedding-type")]
        case.model.append("--position-embedding-type=rope")
    width = draw.one(4, 6, 9)
    case.model += [
        f"--hybrid-layer-pattern={'|'.join(stages)}{prediction}", f"--mamba-num-groups={groups}",
        f"--mamba-num-heads={groups * draw.one(1, 2, 3)}", f"--mamba-head-dim={draw.one(3, 5, 8)}",
        f"--mamba-state-dim={draw.one(4, 7, 16)}", f"--linear-num-key-heads={keys}", f"--linear-num-value-heads={keys}",
        f"--linear-key-head-dim={width}", f"--linear-value-head-dim={width}",
        f"--linear-conv-kernel-dim={draw.one(2, 4)}",
    ]  # fmt: skip


def _pack_documents(case: LayoutCase) -> None:
    """Give some cases sequences of several documents, which do not see each other."""
    draw = Draw(case.seed, "documents")
    if not draw.chance(0.3):
        return
    draw.flags = ["--data-path", str(write_short_documents()), "--split=100,0,0"]
    draw.maybe(
        1.0, "--dataloader-inter-document-masking", "--dataloader-inter-document-masking",
        "--reset-attention-mask --reset-position-ids --eod-mask-loss",
    )  # fmt: skip
    micro, batch = (int(_take(case.model, f"--{name}-batch-size")) for name in ("micro", "global"))
    # Pipeline stages exchange packed sequences one by one.
    kept = 1 if case.sizes["pp"] > 1 else micro
    draw.flags += [f"--micro-batch-size={kept}", f"--global-batch-size={batch // micro * kept}"]
    case.model[:] = [flag for flag in case.model if flag != "--mock-data"] + draw.flags


def _take(flags: list[str], name: str) -> str:
    """Remove a flag; return its value."""
    flag = next(flag for flag in flags if flag.startswith(f"{name}="))
    flags.remove(flag)
    return flag.split("=")[1]


@functools.cache
def write_short_documents() -> Path:
    """Write 3,000 documents of 1 to 40 tokens, all below 60, for this process; return their path prefix."""
    directory = Path(tempfile.mkdtemp(prefix="short-documents-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    random_numbers = np.random.default_rng(0)
    builder = IndexedDatasetBuilder(str(directory / "documents.bin"), dtype=np.int32)
    for length in random_numbers.choice([1, 1, 2, 3, 5, 9, 20, 40], 3000):
        builder.add_document(torch.tensor(random_numbers.integers(0, 60, length), dtype=torch.int32), [int(length)])
    builder.finalize(str(directory / "documents.idx"))
    return directory / "documents"


def _draw_experts(draw: Draw, sizes: dict[str, int]) -> list[str]:
    count = sizes["ep"] * draw.one(*[n for n in (1, 2, 3) if sizes["ep"] * n >= 2])
    topk = draw.one(*[n for n in (1, 2, 3) if n <= count])
    width = sizes["etp"] * draw.one(7, 12, 18)
    draw.flags = [f"--num-experts={count}", f"--moe-router-topk={topk}", f"--moe-ffn-hidden-size={width}"]
    draw.maybe(0.3, "--moe-layer-freq=2")
    draw.maybe(0.5, "--moe-grouped-gemm")
    draw.maybe(0.5, "--moe-token-dispatcher-type=alltoall", "--moe-token-dispatcher-type=allgather")
    draw.maybe(
        0.6, "--moe-aux-loss-coeff=0.1", "--moe-router-load-balancing-type=seq_aux_loss --moe-aux-loss-coeff=0.1",
        "--moe-z-loss-coeff=0.01", "--moe-router-load-balancing-type=none",
    )  # fmt: skip
    draw.maybe(0.3, f"--moe-shared-expert-intermediate-size={sizes['tp'] * 6}")
    draw.maybe(
        # The softmax of one chosen score is 1, whatever the score.
        1.0 if topk == 1 else 0.3, "--moe-router-score-function=sigmoid", "--moe-router-pre-softmax",
        "--moe-router-score-function=sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate=0.01",
    )  # fmt: skip
    if sizes["etp"] > 1 and draw.chance(0.95):
        draw.flags.append("--disable-bias-linear")
    draw.maybe(
        0.3, "--moe-expert-capacity-factor=1.1", "--moe-permute-fusion",
        "--moe-expert-capacity-factor=0.8 --moe-token-drop-policy=position",
    )  # fmt: skip
    return draw.flags


def _draw_training(draw: Draw, sizes: dict[str, int], optimizer: str, virtual: int) -> list[str]:
    micro = draw.one(1, 1, 2, 3)
    # The interleaved schedule takes multiples of the stages.
    count = sizes["pp"] * draw.one(1, 2) if virtual > 1 else draw.one(1, 2, 3, 5)
    draw.flags = [
        "--mock-data", "--tokenizer-type=NullTokenizer", "--eval-iters=0", "--num-workers=0", "--lr=1e-3",
        f"--train-iters={ITERATIONS}", f"--micro-batch-size={micro}",
        f"--global-batch-size={micro * sizes['dp'] * count}", f"--optimizer={optimizer}",
    ]  # fmt: skip
    draw.maybe(0.5, "--clip-grad=0", "--clip-grad=0.1")
    draw.maybe(0.5, "--weight-decay=0.1", "--weight-decay=0")
    draw.maybe(0.3, "--lr-warmup-iters=3", "--lr-decay-style=cosine --min-lr=1e-5", "--lr-decay-style=constant")
    if optimizer == "adam":
        # Below this, Adam divides the rounding of a gradient that is zero in exact arithmetic by itself.
        draw.flags.append("--adam-eps=1e-6")
    draw.maybe(0.15, "--calculate-per-token-loss")
    draw.maybe(0.15, "--accumulate-allreduce-grads-in-fp32")
    return draw.flags


def _draw_layout(draw: Draw, sizes: dict[str, int], schedule: str, virtual: int, a2a: bool, experts: bool) -> list[str]:
    draw.flags = []
    if sizes["tp"] > 1:
        # Experts with tensor parallelism need sequence parallelism.
        draw.maybe(1.0 if experts else 0.5, "--sequence-parallel")
        if "--sequence-parallel" in draw.flags:
            draw.maybe(0.25, "--tp-comm-overlap", "--tp-comm-overlap --tp-comm-overlap-rs-dgrad")
    if sizes["cp"] > 1:
        draw.flags.append("--cp-comm-type=a2a" if a2a else draw.one("--cp-comm-type=p2p", "--cp-comm-type=all_gather"))
    if sizes["pp"] > 1:
        if schedule == "interleaved":
            draw.flags.append(f"--num-virtual-stages-per-pipeline-rank={virtual}")
            draw.maybe(0.15 if sizes["pp"] > 2 else 0, "--no-overlap-p2p-communication")
        elif schedule != "1f1b":
            draw.flags.append(f"--pipeline-schedule={schedule}")
        draw.maybe(0.15 if "zb" not in schedule else 0, "--defer-embedding-wgrad-compute")
        draw.maybe(0.2, "--use-tp-pp-dp-mapping")
    if sizes["dp"] > 1:
        # Weight gradients that come later find the layer's sum made.
        is_late = any("zb" in flag or "--defer-embedding" in flag for flag in draw.flags)
        if not is_late and draw.chance(0.4):
            draw.maybe(
                1.0, "--use-torch-fsdp2", "--use-torch-fsdp2 --megatron-fsdp-enable-fine-grained-param-gather",
                "--use-megatron-fsdp --data-parallel-sharding-strategy=optim_grads_params",
                "--use-megatron-fsdp --data-parallel-sharding-strategy=optim_grads",
            )  # fmt: skip
        else:
            draw.maybe(
                0.7, "--use-distributed-optimizer", "--use-distributed-optimizer --overlap-grad-reduce",
                "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", "--overlap-grad-reduce",
            )  # fmt: skip
        draw.maybe(0.2, "--ddp-num-buckets=3", "--ddp-bucket-size=1000", "--ddp-average-in-collective")
        if sizes["dp"] == 4 and "--use-distributed-optimizer" in draw.flags:
            draw.maybe(0.4, "--num-distributed-optimizer-instances=2")
    draw.maybe(
        0.3, "--recompute-granularity=selective", "--recompute-granularity=selective --recompute-modules mlp layernorm"
    )
    draw.maybe(
        0.15, "--recompute-granularity=full --recompute-method=uniform --recompute-num-layers=1",
        "--recompute-granularity=full --recompute-method=block --recompute-num-layers=1",
    )  # fmt: skip
    return draw.flags


# ---- judging a case


def train_share(argv: list[str], world_size: int) -> RankTrace:
    """One rank's part of the run."""
    config = read_run_config(argv, {"WORLD_SIZE": str(world_size)})
    return trace_rank(
        config, build_gpt_recipe(config), rank=own_rank(config), iterations=config.training.train_iters or 0
    )


def judge_layout(case: LayoutCase, run: Callable[..., list[RankTrace]] = run_distributed) -> Verdict:
    """Train both ways and compare."""
    try:
        read_run_config(case.divided, {"WORLD_SIZE": str(case.world_size)})
    except ConfigError as error:
        return Verdict("refused", str(error), case.command())
    try:
        found = run(train_share, case.world_size, case.divided, case.world_size, timeout=LIMIT_SECONDS)
        alone = run(train_share, 1, [*case.model, *case.padding], 1, timeout=LIMIT_SECONDS)
    except WorkerError as error:
        return Verdict("fault", str(error), case.command())
    worst = measure_difference(alone[0].losses, found[0].losses)
    limit = TOLERANCE.get(case.optimizer, USUAL_TOLERANCE)
    text = f"losses differ by {worst:.1e} (limit {limit:.0e}, {case.optimizer})"
    return Verdict("ran" if worst <= limit else "fault", text, case.command())


def measure_difference(reference: Sequence[dict[str, float]], found: Sequence[dict[str, float]]) -> float:
    """The largest relative difference of any logged loss; infinite where other losses are logged."""
    worst = 0.0
    for ours, theirs in zip(reference, found, strict=True):
        if ours.keys() != theirs.keys():
            return math.inf
        for name, loss in ours.items():
            difference = abs(theirs[name] - loss) / max(abs(loss), 1e-30)
            # A NaN has to count as a difference, and max() would pass over it.
            worst = difference if not difference <= worst else worst
    return worst

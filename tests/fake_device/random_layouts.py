# SPDX-License-Identifier: Apache-2.0
"""Random layouts on the fake device: is a step's peak memory what the planner's formula says?

    python -m tests.fake_device.random_layouts --count 30 --seed 1

Models (dense, grouped heads, experts, latent attention, hybrid), sizes of all axes, exchanges of attention, schedules,
recomputation, offloading, optimizers and number formats are drawn; what a run would refuse is drawn again. Prints a
line for each layout with the rank that is farthest off, and how many are within 3 %.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron.training.flags.read import examine
from megatron.training.verify.parity_layouts import parse_layout
from tests.fake_device.device import build

ROOT = Path(__file__).resolve().parents[2]
WITHIN = 0.03
_COMMON = """--hidden-size 1024 --seq-length 1024 --max-position-embeddings 1024 --vocab-size 32000 --lr 1e-4
    --mock-data --tokenizer-type NullTokenizer --normalization RMSNorm --disable-bias-linear --hidden-dropout 0
    --attention-dropout 0
    --micro-batch-size 2 --position-embedding-type rope --num-attention-heads 16"""
_DENSE = "--ffn-hidden-size 2816 --swiglu --untie-embeddings-and-output-weights"
_GROUPED = "--group-query-attention --num-query-groups 4"
_EXPERTS = """--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 704 --moe-grouped-gemm --moe-permute-fusion
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01"""
_LATENT = """--multi-latent-attention --q-lora-rank 256 --kv-lora-rank 128 --qk-head-dim 64 --qk-pos-emb-head-dim 32
    --v-head-dim 64"""
_STATES = (
    """--linear-num-value-heads 16 --linear-num-key-heads 16 --linear-key-head-dim 64 --linear-value-head-dim 64"""
)
_PATTERNS = ("M-*-M-M-", "M-M*M-M-", "MMM-*-M-", "G-*-G-K-", "L-*-K-M-")
_LONG = "--seq-length 4096 --max-position-embeddings 4096"
"""Of sequences so long context-parallel ranks hand states over instead of exchanging tokens for heads."""
_RECOMPUTED = {
    "dense": ("layernorm", "mlp_act", "layernorm mlp_act", "core_attn", "mlp"),
    "experts": ("layernorm", "moe_act", "layernorm moe_act", "moe"),
    "latent": ("layernorm", "mla_up_proj", "mla_up_proj mlp_act"),
}
_OFFLOADED = ("attn_norm core_attn", "core_attn attn_proj", "mlp_norm mlp_fc1", "qkv_linear mlp_act")
_LAYERS = 8


class Drawn(NamedTuple):
    """A layout as `python -m tests.fake_device` takes it."""

    name: str
    layout: str
    flags: str


def draw(chooser: random.Random) -> Drawn:
    """One layout, which a run may refuse."""
    kind = chooser.choice(["dense", "grouped", "experts", "latent", "hybrid", "experts of few"])
    tp, pp = chooser.choice([1, 1, 2, 4]), chooser.choice([1, 1, 2, 4])
    dp, cp = chooser.choice([1, 1, 2]), chooser.choice([1, 1, 1, 2])
    vpp = 2 if pp > 1 and chooser.random() < 0.4 else 1
    terms = [f"tp{tp}", *(["sp"] if tp > 1 and chooser.random() < 0.8 else []), f"pp{pp}", f"dp{dp}", f"cp{cp}"]
    flags = [_COMMON, _DENSE]
    if kind == "hybrid":
        length = chooser.choice(["", "", _LONG])
        flags.append(f"{_GROUPED} {_STATES} --hybrid-layer-pattern {chooser.choice(_PATTERNS)} {length}")
    else:
        flags.append(f"--num-layers {_LAYERS}")
    flags += {"grouped": [_GROUPED], "latent": [_LATENT], "experts": [_GROUPED, _EXPERTS]}.get(kind, [])
    if kind == "experts of few":
        flags += [_EXPERTS, _LATENT]
    if "experts" in kind:
        ep = chooser.choice([1, 2])
        terms += [f"ep{ep}", *(["etp1"] if tp > 1 else [])]
        flags.append(f"--moe-token-dispatcher-type {chooser.choice(['alltoall', 'allgather'])}")
    exchange = chooser.choice(["p2p", "p2p", "all_gather", "a2a"]) if cp > 1 else "p2p"
    if vpp > 1:
        terms.append(f"vpp{vpp}")
    elif pp > 1 and chooser.random() < 0.25:
        flags.append("--pipeline-schedule zb-h1")
    draws = (_draw_recomputation(chooser, kind), _draw_replicas(chooser, dp), _draw_formats(chooser))
    flags += [word for words in draws for word in words]
    # In float32 gathered keys take a causal bias of torch's, which no fake tensor has.
    flags.append(f"--cp-comm-type {exchange if draws[2] or exchange == 'a2a' else 'p2p'}")
    micro = chooser.choice([4, 8]) if pp > 1 else chooser.choice([2, 3])
    flags.append(f"--global-batch-size {2 * dp * micro}")
    short = [word for word in terms if not word.endswith("1") or word == "etp1"]
    said = " ".join(" ".join(words) for words in draws if words)
    return Drawn(f"{kind}, {','.join(short) or '1'}, {said or 'plain'}", ",".join(terms), " ".join(flags))


def _draw_recomputation(chooser: random.Random, kind: str) -> list[str]:
    what = chooser.choice(["", "", "uniform", "block", "selective", "selective", "offload"])
    if what == "uniform":
        return [
            f"--recompute-granularity full --recompute-method uniform --recompute-num-layers {chooser.choice([1, 2])}"
        ]
    if what == "block":
        return ["--recompute-granularity full --recompute-method block --recompute-num-layers 1"]
    if what == "selective":
        modules = _RECOMPUTED.get(kind, _RECOMPUTED["experts" if "experts" in kind else "dense"])
        return [f"--recompute-granularity selective --recompute-modules {chooser.choice(modules)}"]
    if what == "offload":
        return [f"--fine-grained-activation-offloading --offload-modules {chooser.choice(_OFFLOADED)}"]
    return []


def _draw_replicas(chooser: random.Random, dp: int) -> list[str]:
    what = chooser.choice(["", "sharded", "sharded", "fsdp2", "host"])
    return {
        "sharded": ["--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"],
        "fsdp2": ["--use-torch-fsdp2"] if dp > 1 else [],
        "host": ["--optimizer-cpu-offload"],
    }.get(what, [])


def _draw_formats(chooser: random.Random) -> list[str]:
    what = chooser.choice(["bf16", "bf16", "bf16", "fp16", "fp32", "fp8", "moments"])
    return {
        "fp16": ["--fp16"], "fp32": [],
        # Blocks of values have no kernel here, and are emulated.
        "fp8": [
            "--bf16 --fp8-format hybrid --fp8-recipe "
            + chooser.choice(["tensorwise", "delayed", "blockwise", "mxfp8 --fp8-emulation"])
        ],
        "moments": [
            "--bf16 --use-precision-aware-optimizer --use-distributed-optimizer "
            f"--exp-avg-dtype {chooser.choice(['bf16', 'fp32'])} --exp-avg-sq-dtype bf16 --main-grads-dtype "
            f"{chooser.choice(['bf16', 'fp32'])}"
        ],
    }.get(what, ["--bf16"])  # fmt: skip


def draw_legal(seed: int, count: int) -> Iterator[Drawn]:
    """Yield so many layouts that a run takes, none twice."""
    chooser = random.Random(seed)
    seen: set[str] = set()
    while len(seen) < count:
        drawn = draw(chooser)
        layout = parse_layout(drawn.layout)
        world = {"WORLD_SIZE": str(layout.world_size)}
        words = [*drawn.flags.split(), *layout.flags, "--train-iters", "3"]
        if drawn.name not in seen and layout.world_size <= 8 and not examine(words, world).problems:
            seen.add(drawn.name)
            yield drawn


def run(library: Path, drawn: Sequence[Drawn]) -> dict[str, Any]:
    """What a rank of each stage of the layouts did, or a traceback; all in a process of their own."""
    requests = {one.name: (one.layout, one.flags, "stages") for one in drawn}
    done = subprocess.run(
        [sys.executable, "-m", "tests.fake_device", library], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
        input=json.dumps(requests), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert done.returncode == 0, f"the fake device ended with exit code {done.returncode}"
    answers: dict[str, Any] = json.loads(done.stdout)
    return answers


def find_worst(ranks: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The rank that is farthest from its formula."""
    return max(ranks, key=lambda rank: abs(measure_error(rank)))


def measure_error(rank: Mapping[str, Any]) -> float:
    """Planned bytes over those of the device, less one."""
    return float(rank["planned_peak_bytes"]) / float(rank["step_peak_bytes"]) - 1


def main() -> int:
    """Draw, run and compare; exit code 1 where a layout is farther off."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=30, help="layouts (default: 30)")
    parser.add_argument("--seed", type=int, default=1, help="of the draw (default: 1)")
    parser.add_argument("--holders", action="store_true", help="show what lives at the peak where the formula is off")
    arguments = parser.parse_args()
    drawn = list(draw_legal(arguments.seed, arguments.count))
    library = build(Path(tempfile.mkdtemp(prefix="fake-device-")))
    assert library is not None, "there is no C++ compiler"
    good = 0
    for one in drawn:
        answer = run(library, [one])[one.name]
        if isinstance(answer, str):
            # A layout that no run has is no good.
            print(f"failed   {one.name}\n{answer}\n  {one.layout} {one.flags}", flush=True)
            continue
        worst = find_worst(answer)
        error = measure_error(worst)
        good += abs(error) <= WITHIN
        number = answer.index(worst)
        print(
            f"{error:>+7.2%} of {worst['step_peak_bytes'] / 1e6:8.1f} MB, stage {number} of {len(answer)}  {one.name}"
        )
        if arguments.holders and abs(error) > WITHIN:
            print(f"  {one.layout} {' '.join(one.flags.split())}\n  after set-up {worst['live_bytes'] / 1e6:.1f} MB")
            most = sorted(worst["peak_holders"].items(), key=lambda item: -item[1])[:14]
            print("\n".join(f"  {size / 1e6:9.1f} MB {place}" for place, size in most), flush=True)
    print(f"{good} of {len(drawn)} layouts within {WITHIN:.0%}, seed {arguments.seed}")
    return 0 if good == len(drawn) else 1


if __name__ == "__main__":
    sys.exit(main())

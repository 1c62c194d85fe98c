# SPDX-License-Identifier: Apache-2.0
"""Random models in FP8 and FP4: is each layout the run that one process makes, and does recomputation change nothing?

Both kinds of case are functions of their seed, and draw a recipe, a model whose widths are whole blocks of it (dense,
of experts, of latent attention; some with letters), and options. A layout is compared with one process: within the
rounding of sums where every operand has the same scales in both, within the band of the format where ranks scale parts
of a matrix. A pair of recomputed modules is compared bit for bit with the run that keeps everything; some are in fp32
or bf16.
"""

from __future__ import annotations

import math

from megatron.core.errors import ConfigError
from megatron.training.flags.read import read_run_config
from tests.parallel.harness import WorkerError, run_distributed
from tests.trial.random_layouts import LIMIT_SECONDS, Draw, LayoutCase, measure_difference, train_share
from tests.trial.verdict import Verdict

RECIPES = {
    "fp32": (16, ""),
    "bf16": (16, "--bf16"),
    "delayed": (16, "--fp8-recipe=delayed"),
    "tensorwise": (16, "--fp8-recipe=tensorwise"),
    "blockwise": (128, "--fp8-recipe=blockwise"),
    "mxfp8": (32, "--fp8-recipe=mxfp8"),
    "nvfp4": (16, "--fp4-format=e2m1"),
}
"""Name -> what divides the width of a rank's part, and flags."""
MODULES = ("core_attn", "layernorm", "mlp", "mlp_act", "mla_up_proj", "moe", "moe_act", "shared_experts")
GATED = "gdn_norm_out"
"""A module of letters G."""


def draw_precision(seed: int) -> LayoutCase:
    """The layout of this seed: two to four processes."""
    draw = Draw(seed, "precision")
    recipe = draw.one(*[name for name in RECIPES if name not in ("fp32", "bf16")])
    while True:
        sizes = {axis: draw.one(1, 1, 2) for axis in ("tp", "cp", "pp")} | {"dp": draw.one(1, 2, 4)}
        if 2 <= math.prod(sizes.values()) <= 4:
            break
    kind = draw.one("dense", "dense", "experts", "latent")
    if kind == "experts":
        sizes["ep"] = draw.one(*[n for n in (1, 2) if (sizes["cp"] * sizes["dp"]) % n == 0])
        sizes["etp"] = 1
    case = LayoutCase(seed, sizes)
    case.model = _draw_model(draw, recipe, kind, sizes)
    case.model += ["--make-vocab-size-divisible-by=16", "--hidden-dropout=0"]
    case.padding = [f"--make-vocab-size-divisible-by={16 * sizes['tp']}"]
    draw.flags = []
    if sizes["tp"] > 1:
        draw.maybe(1.0 if kind == "experts" else 0.5, "--sequence-parallel")
    if sizes["dp"] > 1:
        draw.maybe(0.5, "--use-distributed-optimizer", "--use-torch-fsdp2")
    if sizes["pp"] > 1:
        draw.maybe(0.3, "--num-virtual-stages-per-pipeline-rank=2", "--pipeline-schedule=zb-h1")
    draw.maybe(0.2, "--recompute-granularity=selective --recompute-modules layernorm")
    case.layout = draw.flags
    _make_hybrid(case, RECIPES[recipe][0])
    return case


def draw_recomputation(seed: int) -> LayoutCase:
    """The pair of this seed; its `layout` is what is computed again, on one process."""
    draw = Draw(seed, "recomputation")
    case = LayoutCase(seed, dict.fromkeys(("tp", "cp", "pp", "dp"), 1))
    kind = draw.one("dense", "experts", "latent")
    recipe = draw.one(*RECIPES)
    case.model = [
        *_draw_model(draw, recipe, kind, case.sizes),
        f"--hidden-dropout={draw.one(0, 0.1)}",
        "--clip-grad=0",
    ]
    absent = {"dense": MODULES[4:], "experts": ("mla_up_proj",), "latent": MODULES[5:]}[kind]
    pair = draw.random.sample([module for module in MODULES if module not in absent], 2)
    case.layout = ["--recompute-granularity=selective", "--recompute-modules", *pair]
    if "G" in _make_hybrid(case, RECIPES[recipe][0]):
        case.layout[-1] = GATED
    return case


def _draw_model(draw: Draw, recipe: str, kind: str, sizes: dict[str, int]) -> list[str]:
    unit, flags = RECIPES[recipe]
    tp = sizes["tp"]
    hidden = unit * tp * draw.one(*((1, 2, 3) if unit < 128 else (1,)))
    heads = tp * draw.one(1, 2, 4)
    micro = draw.one(1, 2)
    samples = micro * sizes["dp"] * 2 * sizes["pp"]
    length = 16 * sizes["tp"] * sizes["cp"]
    draw.flags = [
        *flags.split(), f"--hidden-size={hidden}", f"--num-attention-heads={heads}", f"--seq-length={length}",
        f"--max-position-embeddings={length}", f"--num-layers={draw.one(2, 4) if sizes['pp'] == 1 else 4}",
        f"--ffn-hidden-size={unit * tp * draw.one(1, 2, 3)}", "--vocab-size=125", "--attention-dropout=0",
        "--mock-data", "--tokenizer-type=NullTokenizer", "--eval-iters=0", "--num-workers=0", "--train-iters=4",
        f"--micro-batch-size={micro}", f"--global-batch-size={samples}",
        # Adam would make whole steps of what is rounded otherwise.
        "--optimizer=sgd", "--lr=0.1",
    ]  # fmt: skip
    draw.maybe(0.6, "--swiglu", "--squared-relu")
    draw.maybe(0.6, "--normalization=RMSNorm")
    draw.maybe(0.5, "--disable-bias-linear")
    if recipe not in ("fp32", "bf16"):
        draw.maybe(0.2, "--no-fp8-wgrad", "--first-last-layers-bf16", "--fp8-bf16-layers=*.linear_fc2")
    if "fp8" in flags:
        draw.maybe(1.0, "--fp8-format=hybrid", "--fp8-format=hybrid", "--fp8-format=e4m3")
    if recipe == "delayed":
        draw.maybe(0.5, "--fp8-amax-history-len=3 --fp8-amax-compute-algo=max", "--fp8-margin=2", "--fp8-interval=2")
    if kind == "latent":
        draw.flags += [
            "--multi-latent-attention", "--position-embedding-type=rope", f"--kv-lora-rank={unit * draw.one(1, 2)}",
            f"--qk-head-dim={unit}", f"--qk-pos-emb-head-dim={unit}", f"--v-head-dim={unit}",
        ]  # fmt: skip
        draw.maybe(0.6, f"--q-lora-rank={unit}")
        draw.maybe(0.5, "--qk-layernorm")
    else:
        draw.maybe(0.5, f"--position-embedding-type=rope --kv-channels={max(unit // heads * tp, 16)}")
    if kind == "experts":
        draw.flags += [
            f"--num-experts={sizes.get('ep', 1) * 2}", f"--moe-router-topk={draw.one(1, 2)}",
            "--moe-router-pre-softmax", f"--moe-ffn-hidden-size={unit}", "--moe-aux-loss-coeff=0.01",
        ]  # fmt: skip
        draw.maybe(0.4, f"--moe-shared-expert-intermediate-size={unit * tp}")
        draw.maybe(0.4, "--moe-grouped-gemm")
    return draw.flags


def _make_hybrid(case: LayoutCase, unit: int) -> str:
    """Give some cases layers of letters; return them. unit: what divides the width of a rank's part."""
    # Choices of its own, so that all other cases stay what they are.
    draw, tp = Draw(case.seed, "hybrid in low precision"), case.sizes["tp"]
    if not draw.chance(0.4):
        return ""
    attention = "+" if "--multi-latent-attention" in case.model else "*"
    kinds = f"MGK{attention}-" + "E" * any(flag.startswith("--num-experts") for flag in case.model)
    # What the other flags are about is in the model, and so are stages of equally many layers.
    letters = draw.random.choices(kinds, k=draw.one(1, 2, 3)) + [kind for kind in f"{attention}-E" if kind in kinds]
    letters += draw.random.choices(kinds, k=-len(letters) % (2 * case.sizes["pp"]))
    draw.random.shuffle(letters)
    heads, width = unit * tp, draw.one(4, 8)
    case.model[:] = [flag for flag in case.model if not flag.startswith(("--num-layers", "--lr="))]
    case.layout[:] = [flag for flag in case.layout if not flag.startswith("--num-virtual-stages")]
    # Steps as long as those of other cases would make fp32 rounding visible: gradients are ten times as large.
    case.model += [
        "--lr=0.01", f"--hybrid-layer-pattern={''.join(letters)}", f"--mamba-num-groups={tp}",
        f"--mamba-num-heads={heads}", f"--mamba-head-dim={width}", f"--mamba-state-dim={unit // 2}",
        f"--linear-num-key-heads={heads}", f"--linear-num-value-heads={heads}", f"--linear-key-head-dim={width}",
        f"--linear-value-head-dim={width}",
    ]  # fmt: skip
    return "".join(letters)


def find_recipe(case: LayoutCase) -> str:
    """Return the name of the recipe that a case's flags ask for."""
    return next(
        name for name, (_, flags) in reversed(RECIPES.items()) if all(flag in case.model for flag in flags.split())
    )


# ---- judging a case


def judge_precision(case: LayoutCase) -> Verdict:
    """Train under the layout and on one process, and compare losses."""
    try:
        read_run_config(case.divided, {"WORLD_SIZE": str(case.world_size)})
    except ConfigError as error:
        return Verdict("refused", str(error), case.command())
    try:
        found = run_distributed(train_share, case.world_size, case.divided, case.world_size, timeout=LIMIT_SECONDS)
        alone = run_distributed(train_share, 1, [*case.model, *case.padding], 1, timeout=LIMIT_SECONDS)
    except WorkerError as error:
        return Verdict("fault", str(error), case.command())
    recipe, limits = find_recipe(case), find_limits(case)
    for steps, limit in zip((1, len(found[0].losses)), limits, strict=True):
        worst = measure_difference(alone[0].losses[:steps], found[0].losses[:steps])
        if not worst <= limit:
            break
    text = f"losses differ by {worst:.1e} in {steps} steps (limit {limit:.0e}, {recipe})"
    return Verdict("ran" if worst <= limit else "fault", text, case.command())


def find_limits(case: LayoutCase) -> tuple[float, float]:
    """The relative differences of the first loss, and of any, that rounding explains."""
    recipe = find_recipe(case)
    # In the first step experts' rows, of several replicas, have one scale; in one process each microbatch has its own.
    scales_of_one_process = recipe == "delayed" and case.sizes.get("ep", 1) == 1
    if scales_of_one_process or all(case.sizes.get(axis, 1) == 1 for axis in ("tp", "cp", "ep")):
        return 1e-5, 1e-3
    return (1e-2, 1e-2) if recipe == "nvfp4" else (2e-3, 2e-3)


def judge_recomputation(case: LayoutCase) -> Verdict:
    """Train with and without recomputation: the same bits."""
    try:
        read_run_config(case.divided, {"WORLD_SIZE": "1"})
        found, alone = (
            run_distributed(train_share, 1, flags, 1, timeout=LIMIT_SECONDS)[0] for flags in (case.divided, case.model)
        )
    except ConfigError as error:
        return Verdict("refused", str(error), case.command())
    except WorkerError as error:
        return Verdict("fault", str(error), case.command())
    same = (found.losses, found.grad_norms) == (alone.losses, alone.grad_norms)
    text = "the same bits" if same else f"losses {found.losses}, without recomputation {alone.losses}"
    return Verdict("ran" if same else "fault", text, case.command())

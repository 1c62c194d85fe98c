# SPDX-License-Identifier: Apache-2.0
"""Digests of what training and generation compute, to show that a change moves no number: run before and after it,
then compare.

    python tests/numerics_digest.py > before.txt
    git switch my-change && python tests/numerics_digest.py | diff before.txt -
    python tests/numerics_digest.py "gpt2 1" "llama tp2,sp"        some rows only
    python tests/numerics_digest.py --list                         the names of all rows

One line for each reference run (a, b, c), each layout of the small table, each style of experts and each row of MORE:
SHA-256 of the losses and gradient norms of ten iterations (50 for the reference runs, 3 for MORE), of the first
iteration's gradients, and of the weights after the last, bit for bit. The rows of generation have the tokens, the
log-probabilities that the passes with a cache gave, and those of the complete texts in one pass. Digests belong to one
processor and one version of torch; they are not expectations.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.core.inference.generate import generate
from megatron.core.inference.sampling import Sampling
from megatron.training.config.container import RunConfig
from megatron.training.flags.read import read_run_config
from megatron.training.recipes.gpt import build_gpt_model, build_gpt_recipe
from megatron.training.recipes.recipe import Recipe
from megatron.training.verify.parity import RankTrace, trace_rank
from megatron.training.verify.parity_layouts import parse_layout
from tests.golden import test_train_curves as curves
from tests.parallel import test_hybrid_context, test_layouts
from tests.parallel.harness import run_distributed, server
from tests.parallel.small_training import COMMON, EXPERTS, FURTHER, OPTIONS, STYLES, own_rank, training
from tests.unit.datasets.test_sft_dataset import CONVERSATIONS, write

EXPERT_LAYOUTS = (
    "1",
    "dp2,ep2",
    "tp2,ep2,etp1,sp",
    "pp2,dp2,ep2,--moe-token-dispatcher-type=alltoall,--pipeline-schedule=zb-h1",
    "dp4,ep2,dist-opt,overlap-all,--micro-batch-size=1",
)

# ---- policies, low precision, documents, multi-token prediction, letters

DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1 --attention-backend local"
# Widths that the blocks of every recipe divide.
LOW_PRECISION = """--position-embedding-type rope --normalization RMSNorm --swiglu --hidden-size 128
    --ffn-hidden-size 128 --disable-bias-linear --num-layers 3"""
LETTERS = """--num-layers 4 --position-embedding-type rope --normalization RMSNorm --swiglu --ffn-hidden-size 48
    --disable-bias-linear --hybrid-layer-pattern"""
STATE_SIZES = """--mamba-num-heads 6 --mamba-head-dim 5 --mamba-num-groups 2 --mamba-state-dim 7
    --linear-num-key-heads 4 --linear-num-value-heads 4 --linear-key-head-dim 6 --linear-value-head-dim 6"""
MORE_STYLES = {
    "gpt2-dropout": DROPOUT,
    "llama-dropout": f"{STYLES['llama']} {DROPOUT}",
    "moe-dropout": f"{EXPERTS['moe']} --hidden-dropout 0.1",
    "latent-dropout": f"{OPTIONS['latent']} --hidden-dropout 0.1",
    "window": f"{STYLES['llama']} --window-size 4,0 --window-attn-skip-freq 2",
    "chunks": f"{STYLES['llama']} --attention-chunk-size 5 --no-rope-freq 2",
    "fp8": f"{LOW_PRECISION} --fp8-format hybrid",
    "fp8-moe": f"{LOW_PRECISION} --fp8-format e4m3 --num-experts 4 --moe-ffn-hidden-size 128 --moe-layer-freq 2"
    " --moe-shared-expert-intermediate-size 128",
    "fp8-latent": f"{LOW_PRECISION} --fp8-format hybrid --multi-latent-attention --q-lora-rank 32 --kv-lora-rank 32"
    " --qk-head-dim 32 --qk-pos-emb-head-dim 16 --v-head-dim 32",
    "fp4": f"{LOW_PRECISION} --fp4-format e2m1 --bf16",
    "letters": f"{LETTERS} *-E* --num-experts 4 --moe-ffn-hidden-size 24",
    "letters-latent": f"{LETTERS} +-+E --multi-latent-attention --kv-lora-rank 11 --qk-head-dim 6 --v-head-dim 5"
    " --qk-pos-emb-head-dim 4 --num-experts 4 --moe-ffn-hidden-size 24",
    **{f"letters-{letter}": f"{LETTERS} {letter}-*{letter} {STATE_SIZES}" for letter in "MGK"},
    **{f"mtp-{name}": flags for name, flags in FURTHER.items()},
}
SELECTIVE = "--recompute-granularity selective,--recompute-modules"
UNIFORM = "--recompute-granularity full,--recompute-method uniform,--recompute-num-layers"
BLOCK = "--recompute-granularity full,--recompute-method block,--recompute-num-layers"
OFFLOADING = "--fine-grained-activation-offloading,--min-offloaded-tensor-size 0,--offload-modules"
OF_DENSE = "attn_norm qkv_linear core_attn attn_proj mlp_norm mlp_fc1 mlp_act"
DOCUMENTS = "--dataloader-inter-document-masking"
FP8_RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8", "rowwise")
MORE = {
    "gpt2-dropout": (
        *("1", f"1,{SELECTIVE} core_attn", f"1,{SELECTIVE} layernorm", f"1,{SELECTIVE} mlp", f"1,{SELECTIVE} mlp_act"),
        *(f"1,{SELECTIVE} core_attn layernorm mlp", f"1,{UNIFORM} 1", f"1,{UNIFORM} 3", f"1,{BLOCK} 2"),
        f"tp2,{UNIFORM} 2,--distribute-saved-activations",
        f"pp2,vpp2,{BLOCK} 1",
        f"pp2,--pipeline-schedule=zb-h1,{SELECTIVE} core_attn layernorm mlp",
        *("1,--mlp-chunks-for-training 2", f"1,--mlp-chunks-for-training 2,{SELECTIVE} mlp"),
        *("1,--cpu-offloading-num-layers 2", "pp2,--cpu-offloading-num-layers 1", f"1,{OFFLOADING} {OF_DENSE}"),
        f"pp2,vpp2,{OFFLOADING} attn_norm core_attn,{BLOCK} 1",
        f"1,{OFFLOADING} core_attn mlp_act,--activation-offload-fraction 0.5",
    ),
    "llama-dropout": (
        *(f"tp2,sp,--bf16,{SELECTIVE} core_attn layernorm mlp", f"tp2,sp,{UNIFORM} 2", f"dp2,fsdp2,{UNIFORM} 2"),
        f"tp2,sp,{OFFLOADING} {OF_DENSE},{SELECTIVE} layernorm",
    ),
    "moe-dropout": (
        *("1", f"1,{SELECTIVE} moe", f"1,{SELECTIVE} moe_act", f"1,{SELECTIVE} shared_experts"),
        *(f"1,{SELECTIVE} layernorm moe shared_experts", f"1,{UNIFORM} 2", f"dp2,ep2,{SELECTIVE} moe layernorm"),
        f"1,{OFFLOADING} {OF_DENSE} expert_fc1 moe_act",
        f"dp2,ep2,{OFFLOADING} expert_fc1 moe_act",
        "dp2,ep2,--moe-token-dispatcher-type=alltoall,--moe-shared-expert-overlap",
    ),
    "latent-dropout": (
        *("1", f"1,{SELECTIVE} mla_up_proj", f"1,{SELECTIVE} mla_up_proj core_attn layernorm", f"1,{UNIFORM} 1"),
        f"1,{OFFLOADING} {OF_DENSE}",
        "1,--cpu-offloading-num-layers 2",
    ),
    "fp8": (
        *(f"1,--fp8-recipe {recipe}" for recipe in FP8_RECIPES),
        *("tp2,sp", "pp2,--decoder-first-pipeline-num-layers=1", "dp2,dist-opt", "dp2,fsdp2,--fp8-recipe tensorwise"),
        "1,--fp8-recipe mxfp8,--bf16,--first-last-layers-bf16",
        *(f"1,--fp8-recipe {recipe},{SELECTIVE} layernorm" for recipe in ("tensorwise", "mxfp8")),
        *(
            f"1,{SELECTIVE} mlp",
            f"1,{SELECTIVE} core_attn mlp_act",
            f"1,{UNIFORM} 1",
            "1,--cpu-offloading-num-layers 2",
        ),
        f"1,--fp8-recipe tensorwise,{OFFLOADING} {OF_DENSE}",
        "1,--no-fp8-wgrad,--fp8-output-proj",
    ),
    "fp8-moe": ("1", f"1,{SELECTIVE} moe", "dp2,ep2,--fp8-recipe tensorwise"),
    "fp8-latent": ("1", f"1,--fp8-recipe tensorwise,{SELECTIVE} mla_up_proj"),
    "fp4": ("1", "tp2,sp", f"1,{SELECTIVE} layernorm", f"1,{SELECTIVE} mlp", f"1,{UNIFORM} 1"),
    "gpt2": (
        f"1,{DOCUMENTS}",
        f"tp2,sp,{DOCUMENTS}",
        f"pp2,vpp2,--micro-batch-size=1,{DOCUMENTS}",
        "1,--reset-attention-mask",
    ),
    "llama": (
        f"1,{DOCUMENTS}",
        f"cp2,{DOCUMENTS}",
        f"cp2,--cp-comm-type=a2a,{DOCUMENTS}",
        f"1,{DOCUMENTS},{UNIFORM} 1",
    ),
    "window": ("1", f"1,{DOCUMENTS}", "cp2", "pp2"),
    "chunks": ("1", f"1,{DOCUMENTS}", "cp2"),
    "latent": (f"1,{DOCUMENTS}", f"cp2,{DOCUMENTS}", "tp2,sp,pp2"),
    "mtp-tied": ("1", "tp2,sp", "pp3,--pipeline-model-parallel-layout=Ett|ttmm|L", f"1,{DOCUMENTS}", f"1,{UNIFORM} 1"),
    "mtp-untied": ("1", "cp2", "pp2,vpp2", f"cp2,{DOCUMENTS}", "1,--cpu-offloading-num-layers 1"),
    "mtp-experts": ("1", "pp2,dist-opt", f"1,{SELECTIVE} layernorm moe"),
    "letters": ("1", "tp2,sp", "pp2", f"1,{UNIFORM} 1", f"1,{SELECTIVE} layernorm moe"),
    "letters-latent": ("1", "pp2,--hybrid-layer-pattern=+|-|+E|"),
    **{f"letters-{letter}": ("1", "tp2,sp") for letter in "MGK"},
}
# Conversations packed into sequences, or dealt to as many ranks as their length asks for.
PACKED = (("gpt2", "1"), ("llama", "tp2,sp"), ("llama", "cp2"), ("latent", "1"), ("window", "1"))
PACKED += (("chunks", "1"), ("gpt2", f"dp4,{test_hybrid_context.HYBRID}12"))
PACKED += (("letters", "1"), *((f"letters-{letter}", layout) for letter in "MGK" for layout in ("1", "cp2")))


class Row(NamedTuple):
    """A line of the table: what computes a rank's part of it, on how many processes, from which arguments."""

    name: str
    function: Callable[..., Sequence[str]]
    world_size: int
    args: tuple[Any, ...]


def digest_of(share: RankTrace) -> tuple[str, str, str]:
    """Digests of one rank's losses and gradient norms, gradients, and weights."""
    curve = hashlib.sha256(repr((share.losses, share.grad_norms)).encode())
    grads, weights = hashlib.sha256(), hashlib.sha256()
    for held in sorted(share.held, key=lambda held: held.placement.name):
        for total, tensor in ((grads, held.grad), (weights, held.weight)):
            total.update(held.placement.name.encode())
            total.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return curve.hexdigest()[:16], grads.hexdigest()[:16], weights.hexdigest()[:16]


def trace(config: RunConfig, recipe: Recipe, iterations: int) -> RankTrace:
    """Train; what the run says goes to standard error, because standard output has the table."""
    with contextlib.redirect_stdout(sys.stderr):
        return trace_rank(config, recipe, rank=own_rank(config), iterations=iterations)


def layout_digest(flags: str, layout: str, iterations: int) -> tuple[str, str, str]:
    """One rank's part of a small run."""
    config, recipe = training(flags, layout)
    return digest_of(trace(config, recipe, iterations))


def conversations_digest(flags: str, layout: str) -> tuple[str, str, str]:
    """One rank's part of a small run on conversations."""
    config, recipe = test_hybrid_context.training(flags, layout)
    return digest_of(trace(config, recipe, 3))


def reference_digest(case: str, reference: Path, directory: Path) -> tuple[str, str, str]:
    """A reference run on one process."""
    scratch = directory / case
    scratch.mkdir()
    config = read_run_config(curves.command_line(case, reference, scratch), {"WORLD_SIZE": "1"})
    recipe = build_gpt_recipe(config)
    return digest_of(trace(config, recipe, 50))


# ---- generation

GENERATED = ("gpt2", "llama", "latent", "window", "chunks", "moe", *(f"letters-{letter}" for letter in "MGK"))
PROMPTS = {"equal": (6, 6, 6), "unequal": (3, 9, 5, 9)}


def generation_digest(flags: str, lengths: Sequence[int]) -> tuple[str, str, str]:
    """Greedy and drawn tokens of a batch of prompts; log-probabilities of the passes that made the greedy ones, each
    prompt alone where lengths differ; and those of the complete texts, read at once without cache."""
    argv = [*COMMON.split(), *flags.split(), "--seq-length=32", "--max-position-embeddings=32", "--init-method-std=0.3"]
    model = build_gpt_model(read_run_config(argv, {}), 128).eval()
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(128, (length,), generator=generator).tolist() for length in lengths]

    def continue_texts(batch: list[list[int]], sampling: Sampling) -> list[list[int]]:
        texts = generate(model, batch, max_new_tokens=12, sampling=sampling, vocab_size=126, max_sequence_length=32)
        return [text.tokens for text in texts]

    greedy, drawn = continue_texts(prompts, Sampling(greedy=True)), continue_texts(prompts, Sampling(seed=3))
    passes = hashlib.sha256()

    def note(module: Any, args: Any, logits: Tensor) -> None:
        passes.update(logits[:, -1].float().log_softmax(-1).contiguous().numpy().tobytes())

    hook = model.register_forward_hook(note)
    for batch in [prompts] if len({*lengths}) == 1 else [[prompt] for prompt in prompts]:
        continue_texts(batch, Sampling(greedy=True))
    hook.remove()
    complete = hashlib.sha256()
    for prompt, answer in zip(prompts, greedy, strict=True):
        ids = torch.tensor([prompt + answer])
        with torch.no_grad():
            logits = model(ids, torch.arange(ids.shape[1])[None], None)
        complete.update(logits.float().log_softmax(-1).contiguous().numpy().tobytes())
    tokens = hashlib.sha256(repr((greedy, drawn)).encode())
    return tokens.hexdigest()[:16], passes.hexdigest()[:16], complete.hexdigest()[:16]


# ---- the table


def list_rows(directory: Path) -> Iterator[Row]:
    """All rows; directory: where their data is."""
    for case in "abc":
        yield Row(f"golden {case}", reference_digest, 1, (case, directory / "golden", directory))
    runs = [(style, layout) for style, layouts in test_layouts.SMALL.items() for layout in ["1", *layouts]]
    runs += [(style, layout) for style in EXPERTS for layout in EXPERT_LAYOUTS]
    runs += [("sandwich", "1"), ("sandwich", "tp2,sp,pp2"), ("parallel", "1"), ("parallel", "pp2")]
    long, styles = len(runs), STYLES | EXPERTS | OPTIONS | MORE_STYLES
    runs += [(style, layout) for style, layouts in MORE.items() for layout in layouts]
    for number, (style, layout) in enumerate(runs):
        flags = f"{styles[style]} {test_layouts.MICRO_BATCH}"
        iterations = test_layouts.ITERATIONS if number < long else 3
        yield Row(f"{style} {layout}", layout_digest, parse_layout(layout).world_size, (flags, layout, iterations))
    for style, layout in PACKED:
        flags = f"{styles[style]} --data-path {directory / 'chat.jsonl'}"
        world_size = parse_layout(layout).world_size
        yield Row(f"conversations {style} {layout}", conversations_digest, world_size, (flags, layout))
    for style in GENERATED:
        for name, lengths in PROMPTS.items():
            yield Row(f"generation {style} {name}", generation_digest, 1, (styles[style], lengths))


def show(name: str, digests: list[tuple[str, str, str]]) -> None:
    """One line: the name and the digest of all ranks' digests."""
    parts = (hashlib.sha256("".join(part).encode()).hexdigest()[:16] for part in zip(*digests, strict=True))
    print(name, *parts, flush=True)


def main() -> None:
    asked_for = sys.argv[1:]
    server()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        rows = {row.name: row for row in list_rows(directory)}
        if asked_for == ["--list"]:
            print(*rows, sep="\n")
            return
        if unknown := [name for name in asked_for if name not in rows]:
            sys.exit(f"error: there is no row {unknown[0]!r}; --list prints their names")
        curves.lay_out(directory / "golden")
        write(directory / "chat.jsonl", CONVERSATIONS)
        for row in (rows[name] for name in asked_for or rows):
            show(row.name, run_distributed(row.function, row.world_size, *row.args, timeout=600.0))


if __name__ == "__main__":
    main()

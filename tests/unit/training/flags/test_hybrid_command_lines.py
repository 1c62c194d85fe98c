# SPDX-License-Identifier: Apache-2.0
"""Command lines of hybrids and of GPTs with gated delta nets as Megatron-LM's users write them: accepted at full size,
and made small with a layer of each kind."""

from __future__ import annotations

import random

import pytest

from megatron.core.errors import ConfigError
from megatron.core.plan.letters import split_letters
from megatron.core.plan.read import read_plan
from megatron.training.flags.read import read_run_config
from megatron.training.flags.shrink import shrink

RUN = """--hidden-size 1024 --num-attention-heads 16 --micro-batch-size 4 --global-batch-size 32 --seq-length 1024
    --max-position-embeddings 1024 --train-iters 50 --lr-decay-iters 320000 --data-path data/text --vocab-file v.json
    --merge-file m.txt --split 949,50,1 --lr 0.00015 --lr-decay-style cosine --min-lr 1e-5 --weight-decay 1e-2
    --clip-grad 1.0 --lr-warmup-fraction .01 --eval-iters 10 --transformer-impl transformer_engine --use-mcore-models
    --no-gradient-accumulation-fusion --attention-softmax-in-fp32 --ckpt-format torch_dist --bf16"""
SPECS = (
    "", "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec",
    "--spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec --is-hybrid-model",
)  # fmt: skip
EXPERTS = """--num-experts 8 --moe-grouped-gemm --moe-router-topk 2 --moe-router-score-function sigmoid
    --moe-router-enable-expert-bias --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
    --moe-shared-expert-intermediate-size 512 --moe-ffn-hidden-size 512 --moe-token-dispatcher-type alltoall"""
DELTA = """--swiglu --apply-layernorm-1p --qk-layernorm --attention-output-gate --rotary-percent 0.25
    --linear-num-key-heads 4 --linear-num-value-heads 8 --linear-key-head-dim 64 --linear-value-head-dim 64"""
LATENT = """--multi-latent-attention --kv-lora-rank 128 --qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 64"""
OPTIONS = (
    "--deterministic-mode --attention-backend unfused", "--disable-mamba-mem-eff-path",
    "--mamba-state-dim 128 --mamba-head-dim 64 --mamba-num-groups 8 --mamba-num-heads 32",
    "--mamba-training-ssm-states-dtype bf16 --mamba-inference-ssm-states-dtype fp32",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
    "--cuda-graph-impl local --te-rng-tracker", "--use-distributed-optimizer --overlap-grad-reduce",
    "--fp8-format hybrid --fp8-recipe tensorwise --first-last-layers-bf16 --num-layers-at-end-in-bf16 2",
    "--squared-relu --disable-bias-linear --untie-embeddings-and-output-weights",
    "--async-save --async-strategy mcore --use-persistent-ckpt-worker", "--calculate-per-token-loss",
)  # fmt: skip


def draw_line(seed: int) -> str:
    """A pattern of some letters in some layout, with what they need and some options."""
    draw = random.Random(seed)
    letters = draw.choice(["M-*", "ME*", "GE*", "M-+", "MG*-E", "G-*", "M"])
    tp, pp = draw.choice([(1, 1), (2, 1), (2, 2), (1, 2)])
    stages = [letters + "".join(draw.choices(letters, k=3)) for _ in range(pp * draw.choice([1, 2] if pp > 1 else [1]))]
    is_even = pp == 1 or draw.random() < 0.3
    pattern = "".join([stages[0]] * pp) if is_even else "|".join(stages)
    predicted = f"/{letters}" * draw.choice([0, 1, 2])
    old = predicted and draw.random() < 0.5
    parts = [
        draw.choice(SPECS), draw.choice(["--hybrid-layer-pattern", "--hybrid-override-pattern"]),
        pattern + (predicted if not old else ""),
        f"--mtp-num-layers {predicted.count('/')} --mtp-hybrid-override-pattern {letters}" if old else "",
        draw.choice(["--position-embedding-type none", "--position-embedding-type rope"]),
        f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp}", "--sequence-parallel" * (tp > 1),
        f"{EXPERTS} --expert-model-parallel-size 2" if "E" in letters else "",
        DELTA if "G" in letters else "", LATENT if "+" in letters else "--group-query-attention --num-query-groups 8",
        draw.choice([f"--num-layers {len(pattern.replace('|', ''))}", "--num-layers 24", ""]),
        *draw.sample(OPTIONS, 2),
    ]  # fmt: skip
    line = " ".join(parts)
    if "+" in letters:
        line = line.replace("--position-embedding-type none", "--position-embedding-type rope")
    return line.replace("--squared-relu", "") if "--swiglu" in line else line


@pytest.mark.parametrize("seed", range(24))
def test_lines_of_hybrids(seed: int) -> None:
    line = f"{RUN} {draw_line(seed)}".split()
    config = read_run_config(line, {"WORLD_SIZE": "8"})
    pattern = config.model.hybrid_layer_pattern
    assert config.model.num_layers == len(split_letters(pattern).decoder)
    words, processes = shrink(line, {"WORLD_SIZE": "8"})
    small = read_run_config(words, {"WORLD_SIZE": str(processes)}).model
    assert {*read_plan(small).branches()} and small.hidden_size == 64
    kinds, of_small = ({branch.kind for branch in read_plan(each).branches()} for each in (config.model, small))
    assert kinds == of_small


GPT = f"""{RUN} {DELTA} --num-layers 12 --group-query-attention --num-query-groups 2 --disable-bias-linear
    --position-embedding-type rope --untie-embeddings-and-output-weights --apply-wd-to-qk-layernorm"""


@pytest.mark.flags("--linear-attention-freq", "--experimental-attention-variant")
@pytest.mark.parametrize(
    "flags",
    [
        f"--experimental-attention-variant gated_delta_net --linear-attention-freq 3 {EXPERTS}",
        "--experimental-attention-variant gdn --linear-attention-freq 3 --pipeline-model-parallel-size 2",
        "--experimental-attention-variant gdn --linear-attention-freq ([1]*3+[0]*1)*3 --mtp-num-layers 1",
        "--experimental-attention-variant gdn --linear-attention-freq 4 --tensor-model-parallel-size 2 "
        "--context-parallel-size 2",
        "--experimental-attention-variant gdn2 --linear-attention-freq 4 --recompute-granularity selective "
        "--recompute-modules core_attn gdn_norm_out",
    ],
)
def test_lines_of_gpts_with_delta_nets(flags: str) -> None:
    line = f"{GPT} {flags}".split()
    config = read_run_config(line, {"WORLD_SIZE": "8"})
    words, processes = shrink(line, {"WORLD_SIZE": "8"})
    small = read_run_config(words, {"WORLD_SIZE": str(processes)}).model
    kinds, of_small = ({branch.kind for branch in read_plan(each).branches()} for each in (config.model, small))
    assert kinds == of_small and len(kinds & {"gated_delta_net", "gated_delta_net_2", "attention"}) == 2
    assert small.linear_num_key_heads == 4


def test_recomputation_of_a_norm_that_is_nowhere() -> None:
    with pytest.raises(ConfigError, match="gdn_norm_out needs a gated delta net"):
        read_run_config(
            f"{RUN} --num-layers 2 --recompute-granularity selective --recompute-modules gdn_norm_out".split(), {}
        )

# SPDX-License-Identifier: Apache-2.0
"""tools/check_parity.py as its users start it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from megatron.training.flags.read import read_run_config
from megatron.training.flags.shrink import shrink
from tests.functional.pretrain_runs import ROOT, TINY, environment


def check(*arguments: str, start: Sequence[str] = TINY) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / "check_parity.py"), *start, *arguments],
        capture_output=True, text=True, env=environment({}), timeout=200, check=False,
    )  # fmt: skip


def test_layouts_that_agree() -> None:
    done = check("--iterations", "2", "--layouts", "tp2,sp", "dp2")
    assert done.returncode == 0, done.stderr
    assert "tp2,sp (2 processes): the same run" in done.stdout and "dp2 (2 processes): the same run" in done.stdout


def test_a_layout_that_does_not_agree_is_told_where() -> None:
    """Another seed stands for a mistake in one term."""
    done = check("--iterations", "1", "--layouts", "dp2,--seed=99")
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("dp2,--seed=99 (2 processes): ANOTHER RUN; "))
    assert lines[start + 1] == "  it begins with the data: the ranks read other samples than one process"
    assert lines[start + 2] == "      differs: tokens"
    assert lines[start + 3].strip().startswith("element [sample ")
    assert any(line.startswith("  what comes after it differs, too: ") for line in lines)
    assert lines[-1] == "  the smallest part of dp2,--seed=99 that shows it: --seed=99"
    assert "  trying dp2: it does not show" in lines and "  trying --seed=99: it shows, too" in lines


SPARSE = """--num-layers 78 --hidden-size 6144 --ffn-hidden-size 12288 --num-attention-heads 64 --seq-length 4096
    --max-position-embeddings 202752 --multi-latent-attention --q-lora-rank 2048 --kv-lora-rank 512 --qk-head-dim 192
    --qk-pos-emb-head-dim 64 --v-head-dim 256 --qk-layernorm --experimental-attention-variant dsa
    --dsa-indexer-n-heads 32 --dsa-indexer-head-dim 128 --dsa-indexer-topk 2048 --dsa-indexer-topk-freq 4
    --dsa-indexer-skip-topk-offset 2 --dsa-indexer-loss-coeff 0.01 --dsa-indexer-use-sparse-loss
    --dsa-indexer-rope-interleaved --dsa-indexer-k-norm-epsilon 1e-6 --position-embedding-type rope
    --rotary-base 1000000
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --micro-batch-size 1
    --global-batch-size 64 --lr 1e-3 --train-iters 10 --mock-data --tokenizer-type NullTokenizer --vocab-size 154880
    --tensor-model-parallel-size 4 --sequence-parallel --context-parallel-size 2 --cp-comm-type allgather"""


def test_sparse_attention_as_upstream_starts_it() -> None:
    """In small, each token chooses among keys, and every second layer takes the choice of the one before."""
    words, _ = shrink(SPARSE.split(), {"WORLD_SIZE": "8"}, most_processes=1)
    model = read_run_config(words, {}).model
    assert model.dsa_indexer_topk is not None and model.dsa_indexer_topk < 64 / 2 and model.dsa_indexer_topk_freq == 2
    done = check(*words, "--iterations", "2", "--layouts", "tp2,sp", "cp2,--cp-comm-type=allgather", "dp2", start=())
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("(2 processes): the same run") == 3


def test_sizes_among_the_flags_belong_to_layouts() -> None:
    done = check("--tensor-model-parallel-size", "2", "--layouts", "dp2")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == (
        "error: --tensor-model-parallel-size 2 divides the run, and what is compared is one process with layouts of "
        "it: leave it out and give --layouts tp2\n"
    )


def test_illegal_layouts_are_refused_before_anything_runs() -> None:
    done = check("--layouts", "tp3", "dp2", "tp4,--num-attention-heads=6")
    assert done.returncode == 2 and done.stdout == ""
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert errors[0].startswith("error: layout tp3: --num-attention-heads 2 cannot be split over")
    assert any("layout tp4,--num-attention-heads=6: " in line for line in errors[1:])

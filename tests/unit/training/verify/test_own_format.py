# SPDX-License-Identifier: Apache-2.0
"""Gradients in a run's own number format against float64, products in 8 and 4 bits against their reference; and what
`check_parity --gradients` makes of it."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.cli.check_parity import main
from megatron.core import fp4
from megatron.core.tensor_parallel import fp8_products, products
from megatron.core.tensor_parallel.fp8_products import FP8Matmul
from megatron.core.transformer.rotary import _RotateAndJoin
from megatron.training.flags.read import read_run_config
from megatron.training.recipes.gpt import build_gpt_recipe
from megatron.training.verify.own_format import FormatReport, check_own_format

TINY = """
    --num-layers 1 --hidden-size 32 --num-attention-heads 2 --ffn-hidden-size 64 --seq-length 20
    --max-position-embeddings 20 --micro-batch-size 1 --global-batch-size 2 --lr 1e-3 --train-iters 2 --mock-data
    --tokenizer-type NullTokenizer --vocab-size 47 --make-vocab-size-divisible-by 16 --eval-iters 0 --num-workers 0
"""
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 32 --swiglu --disable-bias-linear"
WIDE = "--hidden-size 128 --ffn-hidden-size 256 --moe-ffn-hidden-size 128"
LINEAR = "decoder.layers.0.mlp.linear_fc1"


def check(flags: str) -> FormatReport:
    words = [*TINY.split(), *flags.split()]
    return check_own_format(lambda: read_run_config(words, {}), build_gpt_recipe)


@pytest.mark.parametrize("flags", ["", "--bf16 --fp32-residual-connection", "--fp16 --loss-scale 1024"])
@pytest.mark.parametrize("form", ["", EXPERTS])
def test_a_sound_run_has_the_gradients_of_float64(flags: str, form: str) -> None:
    report = check(f"{form} {flags}")
    assert report.errors == {} and 0.0 < report.largest < report.tolerance / 2  # type: ignore[operator]


@pytest.mark.parametrize(
    "flags",
    [
        "--fp8-format hybrid --fp8-amax-history-len 2",
        "--fp8-format e4m3 --fp8-recipe tensorwise --no-fp8-wgrad",
        f"--fp8-format hybrid --fp8-recipe blockwise {WIDE}",
        "--fp8-format hybrid --fp8-recipe mxfp8",
        "--fp4-format e2m1",
    ],
)
def test_products_in_few_bits_are_those_of_the_reference(flags: str) -> None:
    report = check(f"--bf16 {EXPERTS} {flags}")
    steps = 2 if report.dtype == "delayed" else 1
    # Queries, keys and values; projection; two of experts: three products of each in two microbatches.
    assert report.errors == {} and report.products == 4 * 3 * 2 * steps


def narrow_sum(main_grad: Tensor, grad: Tensor, rows: Tensor) -> None:
    """A mistake in bfloat16 alone."""
    main_grad.add_((grad.t() @ rows) * (1.0 if main_grad.dtype == grad.dtype else 0.5))


def test_a_mistake_in_the_run_s_own_format_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "add_weight_grad", narrow_sum)
    assert check("").errors == {}
    report = check("--bf16")
    assert report.errors[f"{LINEAR}.weight"] == pytest.approx(0.5, abs=0.01)
    assert f"{LINEAR}.bias" not in report.errors


def halved(method: Any) -> Any:
    return lambda *args: method(*args) * 0.5


def cut(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded towards zero: the last bits of float32 that the format has not are taken away."""
    kept = 20 if dtype == torch.float8_e4m3fn else 21
    wide = (x.float() * scale).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    return (wide.view(torch.int32) >> kept << kept).view(torch.float32).to(dtype)


@pytest.mark.parametrize(
    ("flags", "owner", "attribute", "replacement", "what"),
    [
        ("--fp8-format hybrid", FP8Matmul, "input_grad", halved(FP8Matmul.input_grad), "gradient of the input of "),
        ("--fp4-format e2m1", FP8Matmul, "input_grad", halved(FP8Matmul.input_grad), "gradient of the input of "),
        ("--fp8-format e4m3 --fp8-recipe tensorwise", "megatron.core.fp8", "round_to", cut, "output of "),
        ("--fp4-format e2m1", fp4, "transform", lambda x, whole=fp4.transform: whole(x) * 4, "gradient of "),
        (
            "--fp8-format hybrid", FP8Matmul, "_replace_amax", lambda self, operand, own: own, "output of ",
        ),
        (
            "--fp8-format hybrid --fp8-margin 2", fp8_products, "compute_scale",
            lambda amax, dtype, margin=0: torch.finfo(dtype).max / amax * 0.9, "output of ",
        ),
    ],
)  # fmt: skip
def test_mistakes_in_few_bits_are_found_by_name(
    flags: str, owner: Any, attribute: str, replacement: Any, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[owner] if isinstance(owner, str) else owner, attribute, replacement)
    report = check(f"--bf16 {flags}")
    assert any(name.startswith(f"{what}{LINEAR}") for name in report.errors), report.errors


def test_the_program_names_the_tensor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A cluster's command line, as it is."""
    backward = _RotateAndJoin.backward

    def halve_latent(*args: Any) -> Any:
        query, expanded, *rest = backward(*args)
        return query, expanded * 0.5, *rest

    flags = "--preset deepseek-v2-lite --tensor-model-parallel-size 8 --lr 1e-4 --train-iters 100 --micro-batch-size 1"
    flags += " --global-batch-size 64 --bf16 --data-path missing --save missing --num-layers 2"
    monkeypatch.setattr(sys, "argv", ["check_parity.py", *flags.split(), "--gradients"])
    monkeypatch.setattr(_RotateAndJoin, "backward", staticmethod(halve_latent))
    assert main() == 1
    lines = capsys.readouterr().out.splitlines()
    start = next(i for i, line in enumerate(lines) if "HAVE ANOTHER GRADIENT" in line)
    first = "decoder.layers.1.self_attention.linear_kv_up_proj.weight"
    assert lines[start + 1].strip().startswith(f"{first}: slope ") and lines[start + 1].endswith(", 0.5 times")
    assert any(line.startswith("  sees: ") for line in lines) and any("does not see: " in line for line in lines)
    assert any(line.startswith("gradients in bfloat16 against those in float64: ") for line in lines)

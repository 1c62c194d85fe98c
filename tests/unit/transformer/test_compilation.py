# SPDX-License-Identifier: Apache-2.0
"""torch.compile of a model's regions: the same function, in graphs without breaks that serve every microbatch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron.core.compiling import outside_of_graphs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import compiled_regions
from megatron.core.transformer.execution import compilation
from megatron.core.transformer.execution.compilation import compile_regions, find_obstacle
from megatron.core.transformer.moe.router import TopKRouter
from megatron.training.setup import switch_compiler_off_where_it_fails
from tests.support.gpt_models import (
    SEQUENCE_LENGTH,
    assert_same_function,
    build_model,
    first_attention,
    first_layer,
    first_mlp,
    losses_and_grads,
    read_config,
    token_batch,
)


@pytest.fixture(autouse=True)
def every_region(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a GPU, and without generating code."""
    monkeypatch.setattr(compiled_regions, "FUSED_BY_HAND_ON_CPU", frozenset())
    monkeypatch.setattr(compilation, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def both(flags: str) -> tuple[GPTModel, GPTModel, int]:
    """The model as it is, and compiled; how many functions were."""
    eager, compiled = build_model(flags), build_model(f"{flags} --compile")
    number = compile_regions(compiled)
    compiled.load_state_dict(eager.state_dict())
    return eager, compiled, number


def count_graphs() -> int:
    """Graphs so far; fails where the compiler broke one off, or gave up on a function."""
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"] and not counters["unimplemented"], counters
    assert counters["frames"]["total"] == counters["frames"]["ok"], counters
    graphs: int = counters["stats"]["unique_graphs"]
    return graphs


@pytest.mark.flags("--compile")
@pytest.mark.parametrize(
    ("flags", "regions"),
    [
        ("", 6),
        ("--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear", 6),
        ("--position-embedding-type rope --qk-layernorm --attention-output-gate --apply-layernorm-1p", 6),
        ("--softmax-type learnable --attn-logit-softcapping 2 --window-size 4,0 --qk-l2-norm", 7),
        ("--bf16 --fp32-residual-connection --recompute-granularity selective --recompute-modules mlp layernorm", 6),
        (
            "--swiglu --recompute-granularity selective --recompute-modules mlp_act --min-offloaded-tensor-size 0 "
            "--fine-grained-activation-offloading --offload-modules attn_norm qkv_linear core_attn mlp_fc1",
            6,
        ),
    ],
)
def test_compiled_regions_compute_the_same(flags: str, regions: int) -> None:
    eager, compiled, number = both(flags)
    assert number == regions
    # The compiler fuses elementary operations.
    assert first_mlp(eager).activate is not first_mlp(compiled).activate
    assert_same_function(eager, compiled, tolerance=0.02 if "bf16" in flags else 1e-5)
    assert compiled.state_dict().keys() == eager.state_dict().keys()
    graphs = count_graphs()
    assert 4 <= graphs <= 10, "layers share the code of a region"
    losses_and_grads(compiled)
    assert count_graphs() == graphs


def test_weight_gradients_are_still_added_inside_the_product() -> None:
    _, compiled, _ = both("")
    linear = compiled.decoder.layers[0].mlp.linear_fc1  # type: ignore[union-attr, index]
    assert isinstance(linear, ColumnParallelLinear) and linear.product.accumulates
    linear.weight.main_grad = torch.ones_like(linear.weight)  # type: ignore[attr-defined]
    ids, places, labels = token_batch()
    compiled(ids, places, labels=labels).sum().backward()
    assert linear.weight.grad is None and not torch.equal(linear.weight.main_grad, torch.ones_like(linear.weight))  # type: ignore[arg-type]


def test_dropout_draws_what_it_draws_without_the_compiler() -> None:
    eager, compiled, _ = both("--hidden-dropout 0.3")
    found = []
    for model in (eager, compiled):
        torch.manual_seed(3)
        found.append(losses_and_grads(model))
    torch.testing.assert_close(found[0][0], found[1][0])
    for name, grad in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], grad, rtol=1e-4, atol=1e-6)
    count_graphs()


def test_any_number_of_rows_of_experts_runs_in_the_same_graphs() -> None:
    """Rows of experts differ from batch to batch: from the second size on, neither graphs nor compilations become
    more. Capacity makes the rows few here, padding none."""
    flags = """--num-experts 4 --moe-layer-freq 2 --moe-ffn-hidden-size 24 --disable-bias-linear --moe-z-loss-coeff 0.1
        --moe-shared-expert-intermediate-size 24 --moe-aux-loss-coeff 0.1 --moe-router-score-function sigmoid
        --moe-expert-capacity-factor 0.9"""
    eager, compiled, _ = both(flags)
    graphs = []
    for seed in range(5):
        ids, places, labels = token_batch(seed=seed)
        found, expected = (model(ids, places, labels=labels) for model in (compiled, eager))
        torch.testing.assert_close(found, expected)
        for model in (compiled, eager):
            model.zero_grad()
        found.mean().backward()
        expected.mean().backward()
        for (name, ours), theirs in zip(compiled.named_parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-7, msg=name)
        graphs.append(count_graphs())
    assert graphs[2:] == graphs[2:3] * 3
    routers = [[part for part in model.modules() if isinstance(part, TopKRouter)] for model in (compiled, eager)]
    for ours, theirs in zip(*routers, strict=True):
        torch.testing.assert_close(ours.take_losses(), theirs.take_losses())


def test_documents_of_every_batch_run_in_the_same_graphs() -> None:
    """Bounds differ from batch to batch; what was compiled for one serves the others."""
    eager, compiled, _ = both("--position-embedding-type rope --window-size 4,0")
    ids, places, labels = token_batch(batch=1)
    graphs = []
    for bounds in ([0, 5, 6, SEQUENCE_LENGTH], [0, 9, SEQUENCE_LENGTH], [0, 1, 2, 3, SEQUENCE_LENGTH]):
        packed = PackedSeqParams(cu_seqlens_q=torch.tensor(bounds))
        found, expected = (model(ids, places, labels=labels, packed_seq_params=packed) for model in (compiled, eager))
        torch.testing.assert_close(found, expected)
        graphs.append(count_graphs())
    assert graphs[0] == graphs[1] == graphs[2]


def test_sequences_of_any_length_run_in_two_sets_of_graphs() -> None:
    eager, compiled, _ = both("--position-embedding-type rope")
    graphs = []
    for length in (16, 11, 7, 13):
        ids, places, labels = token_batch(length=length)
        found, expected = (model(ids, places, labels=labels) for model in (compiled, eager))
        torch.testing.assert_close(found, expected)
        graphs.append(count_graphs())
    assert graphs[0] < graphs[1] == graphs[2] == graphs[3]


def test_on_a_cpu_what_is_as_fast_by_hand_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    flags = "--position-embedding-type rope --swiglu --normalization RMSNorm"
    eager, compiled = build_model(flags), build_model(f"{flags} --compile")
    compile_regions(compiled, backend="aot_eager")
    assert first_layer(compiled).branches[0].bias_dropout_add is first_layer(eager).branches[0].bias_dropout_add
    assert first_layer(compiled).input_layernorm.normalise is first_layer(eager).input_layernorm.normalise
    assert first_attention(compiled).split is not first_attention(eager).split
    assert first_mlp(compiled).activate is not first_mlp(eager).activate


def test_a_machine_without_a_compiler_runs_without(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compilation, "BACKEND", "inductor")

    def broken(function: Any, **options: Any) -> Any:
        def fail(*inputs: Any) -> None:
            raise RuntimeError("no compiler found\nand much more")

        return fail

    monkeypatch.setattr(torch, "compile", broken)
    cpu = torch.device("cpu")
    assert find_obstacle(cpu) == "RuntimeError: no compiler found"
    config = read_config("--compile")
    switch_compiler_off_where_it_fails(config, cpu)
    said = capsys.readouterr().out
    assert "note: --compile has no effect" in said and "no compiler found); it needs a C++ compiler" in said
    assert not config.model.compile


def test_generated_code_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one test that generates code and runs it, which takes some seconds: the region of a gated activation."""
    monkeypatch.setattr(compilation, "BACKEND", "inductor")
    obstacle = find_obstacle(torch.device("cpu"))
    if obstacle is not None:
        pytest.skip(obstacle)
    flags = "--swiglu --disable-bias-linear"
    eager, compiled = first_mlp(build_model(flags)), first_mlp(build_model(f"{flags} --compile"))
    compile_regions(compiled)
    found = []
    for mlp in (eager, compiled):
        x = torch.linspace(-3, 3, 4 * 2 * eager.linear_fc1.weight.shape[0]).view(4, 2, -1).requires_grad_()
        output = mlp.activate(x * 1.0, None, mlp.activation)
        output.square().sum().backward()
        found.append((output.detach(), x.grad))
    torch.testing.assert_close(found[0], found[1])


def test_norms_of_many_widths_are_compiled_in_training_evaluation_and_for_one_sequence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are one function. Latent vectors have widths of their own."""
    monkeypatch.setattr(compilation, "BACKEND", "eager")
    flags = """--multi-latent-attention --position-embedding-type rope --q-lora-rank 13 --kv-lora-rank 11 --v-head-dim 5
        --qk-head-dim 6 --qk-pos-emb-head-dim 4 --qk-layernorm --normalization RMSNorm --disable-bias-linear --bf16
        --num-layers 1 --compile"""
    model = build_model(flags)
    compile_regions(model)
    for batch in (2, 1):
        ids, positions, labels = token_batch(batch)
        model(ids, positions, labels=labels).mean().backward()
        with torch.no_grad():
            model(ids, positions, labels=labels)
    assert count_graphs() > 8


def test_what_stays_outside_of_graphs() -> None:
    """Of a model that is compiled as a whole: the function runs as it is, and its operations are in no graph."""
    ran_compiled, graphs = [], []

    @outside_of_graphs
    def double(x: torch.Tensor) -> torch.Tensor:
        ran_compiled.append(torch.compiler.is_compiling())
        return x * 2

    def record(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph.print_readable(print_output=False))
        return graph.forward

    def whole(x: torch.Tensor) -> torch.Tensor:
        return double(x + 1) - 1

    assert double(torch.ones(2)).tolist() == [2.0, 2.0]
    assert torch.compile(whole, backend=record)(torch.ones(2)).tolist() == [3.0, 3.0]
    assert ran_compiled == [False, False]
    assert len(graphs) == 2 and not any(" * 2" in graph for graph in graphs)

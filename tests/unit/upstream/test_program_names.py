# SPDX-License-Identifier: Apache-2.0
"""Names that other programs use of megatron.core, each called as its callers call it and held against its formula."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.torch_version import TorchVersion

import megatron.core
from megatron.core.errors import ConfigError, UnsupportedError
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from tests.support.pretend_groups import pretend
from tests.unit.upstream.test_upstream_core import use

SHAPE: dict[str, Any] = {"num_layers": 2, "hidden_size": 72, "num_attention_heads": 6}


@pytest.fixture(autouse=True)
def groups() -> Iterator[None]:
    pretend(0).set_current()
    yield
    ProcessGroupCollection.clear_current()


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


def test_the_release() -> None:
    info = use("package_info", "MAJOR", "MINOR", "PATCH", "__version__")
    assert info[3] == ".".join(map(str, info[:3]))
    assert info[3] == megatron.core.__version__
    assert TorchVersion(info[3]) >= "0.16.0"
    assert megatron.core.__version__ != megatron.core.OWN_VERSION


def test_versions() -> None:
    torch_min, te_min, fa_min = use("utils", "is_torch_min_version", "is_te_min_version", "is_fa_min_version")
    own = torch.__version__.partition("+")[0]
    assert torch_min("2.4") and torch_min(own) and not torch_min(own, check_equality=False) and not torch_min("99.0")
    assert te_min("99.0") is fa_min("99.0") is False


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation(interleaved: bool) -> None:
    rope = "models.common.embeddings.rope_utils"
    half, bshd, thd, either = use(
        rope, "_rotate_half", "_apply_rotary_pos_emb_bshd", "_apply_rotary_pos_emb_thd", "apply_rotary_pos_emb"
    )
    t, angles = randn(7, 2, 3, 12), randn(7, 1, 1, 4)
    pairs = torch.cat((angles, angles), -1) if not interleaved else angles.repeat_interleave(2, -1)
    turned = torch.view_as_complex(
        torch.stack((t[..., 0:8:2], t[..., 1:8:2]) if interleaved else (t[..., :4], t[..., 4:8]), -1).contiguous()
    ) * torch.polar(torch.full_like(angles, 1.5), angles)
    parts = torch.view_as_real(turned)
    expected = parts.flatten(-2) if interleaved else torch.cat((parts[..., 0], parts[..., 1]), -1)
    found = bshd(t, pairs, rotary_interleaved=interleaved, mscale=1.5)
    torch.testing.assert_close(found, torch.cat((expected, t[..., 8:]), -1))
    back = bshd(found, pairs, rotary_interleaved=interleaved, mscale=1 / 1.5, inverse=True)
    torch.testing.assert_close(back[..., :8], t[..., :8])
    assert half(t, interleaved).shape == t.shape
    config = SimpleNamespace(rotary_interleaved=interleaved, multi_latent_attention=False)
    torch.testing.assert_close(either(t, pairs, config=config, mscale=1.5), found)
    # Two documents of 3 and 4 tokens, each from the first angle on.
    packed = thd(t[:, 0], torch.tensor([0, 3, 7]), pairs, interleaved, mscale=1.5)
    apart = [bshd(x, pairs[: len(x)], interleaved, mscale=1.5)[:, 0] for x in (t[:3, :1], t[3:, :1])]
    torch.testing.assert_close(packed, torch.cat(apart))
    torch.testing.assert_close(either(t[:, 0], pairs, config, torch.tensor([0, 3, 7]), mscale=1.5), packed)
    # Latent attention's pairs are neighbours, and halves afterwards.
    latent = bshd(t, pairs, interleaved, multi_latent_attention=True)
    ordered = torch.cat((t[..., 0:8:2], t[..., 1:8:2], t[..., 8:]), -1)
    torch.testing.assert_close(latent, bshd(ordered, pairs, interleaved))
    with pytest.raises(UnsupportedError, match="mla_output_remove_interleaving"):
        bshd(t, pairs, mla_output_remove_interleaving=True)


def test_fusions() -> None:
    x, bias, residual = randn(4, 6), randn(6), randn(4, 6) + 1
    for training in (False, True):
        add = use("fusions.fused_bias_dropout", "get_bias_dropout_add")(training, True)
        torch.testing.assert_close(add((x, bias), residual, 0.0), residual + x + bias)
        torch.testing.assert_close(add((x, None), residual, 1.0), residual if training else residual + x)
    warm = use("fusions.fused_bias_dropout", "bias_dropout_add_fused_train")
    torch.testing.assert_close(warm((x, bias), residual, 0.0), residual + x + bias)
    gelu = use("fusions.fused_bias_gelu", "bias_gelu")
    torch.testing.assert_close(gelu(bias, x), F.gelu(x + bias, approximate="tanh"))
    swiglu = use("fusions.fused_bias_swiglu", "bias_swiglu")
    torch.testing.assert_close(swiglu(x, bias), F.silu((x + bias)[:, :3]) * (x + bias)[:, 3:])
    torch.testing.assert_close(use("fusions.fused_bias_geglu", "quick_gelu")(x), x * torch.sigmoid(1.702 * x))
    config = TransformerConfig(**SHAPE, normalization="LayerNorm")
    norm = use("fusions.fused_layer_norm", "FusedLayerNorm")(config, 72, 1e-3)
    wide = randn(3, 72)
    torch.testing.assert_close(norm(wide), F.layer_norm(wide, (72,), eps=1e-3))
    wrapped = use("transformer.torch_norm", "WrappedTorchNorm")(config, 72, 1e-3)
    torch.testing.assert_close(wrapped(wide), norm(wide))
    torch.testing.assert_close(
        use("transformer.torch_norm", "L2Norm")(72, 1e-3)(wide), F.rms_norm(wide, (72,), eps=1e-3)
    )
    with pytest.raises(ConfigError, match="zero_centered_gamma"):
        use("fusions.fused_layer_norm", "FusedLayerNorm")(config, 72, zero_centered_gamma=True)
    with use("fp8_utils", "get_fp8_context")(config, 3, is_init=True):
        pass
    with pytest.raises(UnsupportedError, match="8-bit"):
        use("fp8_utils", "get_fp8_context")(SimpleNamespace(fp8="e4m3"))


def test_experts() -> None:
    logits = randn(9, 8).requires_grad_()
    limited, scores, drop, random, product = use(
        "transformer.moe.moe_utils",
        "group_limited_topk", "compute_routing_scores_for_aux_loss", "apply_router_token_dropping",
        "apply_random_logits", "RouterGatingLinearFunction",
    )  # fmt: skip
    values, chosen = limited(scores=logits, topk=2, num_tokens=9, num_experts=8, num_groups=4, group_topk=1)
    best = logits.view(9, 4, 2).sum(-1).argmax(-1)
    assert torch.equal(chosen.sort(-1).values, torch.stack((2 * best, 2 * best + 1), -1))
    assert torch.equal(values, logits.gather(1, chosen))
    for function, formula in (("softmax", logits.softmax(-1)), ("sigmoid", F.normalize(logits.sigmoid(), 1, -1))):
        routed, found = scores(logits, 2, function, fused=False)
        torch.testing.assert_close(found, formula)
        assert routed.dtype == torch.bool and bool((routed.sum(-1) == 2).all())
        assert bool((formula[routed].view(9, 2).sum(-1) >= formula.topk(2).values.sum(-1) - 1e-6).all())
    weights = logits.softmax(-1) * routed
    capacity = math.ceil(9 * 2 / 8 * 1.0)
    kept_weights, kept = drop(weights, routed, router_topk=2, capacity_factor=1.0)
    for expert in range(8):
        expected = weights[:, expert].topk(capacity).indices
        assert set(kept[:, expert].nonzero()[:, 0].tolist()) == set(expected.tolist()) & set(
            routed[:, expert].nonzero()[:, 0].tolist()
        )
    torch.testing.assert_close(kept_weights, weights * kept)
    _, first = drop(weights, routed, 2, 1.0, drop_policy="position")
    assert bool((first == routed & (routed.cumsum(0) <= capacity)).all())
    assert bool((drop(weights, routed, 2, 1.0, pad_to_capacity=True)[1].sum(0) == capacity).all())
    drawn = random(logits)
    assert not torch.allclose(drawn, logits)
    assert torch.equal(torch.autograd.grad(drawn, logits, torch.ones_like(drawn))[0], torch.ones_like(drawn))
    wide = product.apply(randn(9, 6), randn(8, 6), None, torch.float64)
    torch.testing.assert_close(wide, F.linear(randn(9, 6).double(), randn(8, 6).double()))


def test_choices_are_recorded_and_given_back() -> None:
    replay, action = use("transformer.moe.router_replay", "RouterReplay", "RouterReplayAction")
    replay.clear_global_router_replay_instances()
    config = TransformerConfig(**SHAPE, num_moe_experts=4, moe_router_topk=2, moe_enable_routing_replay=True)
    router = use("transformer.moe.router", "TopKRouter")(config=config, pg_collection=ProcessGroupCollection.current())
    router.set_layer_number(2)
    nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(1))
    x = randn(5, 2, 72)
    replay.set_global_router_replay_action(action.RECORD)
    chosen = router(x).experts
    assert replay.global_router_replay_instances == [router.router_replay]
    assert torch.equal(replay.get_recorded_data()[0], chosen)
    replay.set_global_router_replay_action(action.REPLAY_FORWARD)
    replay.set_replay_data([chosen.flip(0)])
    given = router(x)
    assert torch.equal(given.experts, chosen.flip(0))
    torch.testing.assert_close(given.weights, router.compute_logits(x).gather(1, given.experts).softmax(-1))
    replay.clear_global_indices()
    with pytest.raises(ConfigError, match=r"set_target_indices\(\) takes \[10, 2\]"):
        router(x)
    with pytest.raises(ConfigError, match="choices of 0 routers"):
        replay.set_replay_data([])
    replay.clear_global_router_replay_action()
    weights, routed = router.routing(router.compute_logits(x))
    assert torch.equal(weights.gather(1, chosen), router(x).weights) and bool((routed.sum(1) == 2).all())
    with pytest.raises(ConfigError, match="padding_mask"):
        router.routing(router.compute_logits(x), padding_mask=routed)


def test_a_choice_of_a_programs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = use("transformer.moe.router", "TopKRouter")
    router = kind(TransformerConfig(**SHAPE, num_moe_experts=4, moe_router_topk=2), ProcessGroupCollection.current())
    first = torch.tensor([True, False, False, True])
    monkeypatch.setattr(
        kind, "routing", lambda _, logits: (0.5 * first.expand(len(logits), 4), first.expand(len(logits), 4))
    )
    found = router(torch.zeros(3, 1, 72))
    assert found.experts.tolist() == [[0, 3]] * 3 and bool((found.weights == 0.5).all())


def test_a_part_is_computed_again_with_its_output() -> None:
    outside, inside, x = nn.Linear(6, 6), nn.Linear(6, 6), randn(4, 6).requires_grad_()

    def part(x: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        return F.dropout(inside(x).tanh(), 0.5), factor * x

    def grads(recompute: bool) -> list[Tensor]:
        torch.manual_seed(7)
        block = use("tensor_parallel.random", "CheckpointWithoutOutput")()
        a, b = block.checkpoint(part, x, 2.0) if recompute else part(x, 2.0)
        y = outside(a) * b
        if recompute:
            block.discard_output_and_register_recompute(y)
            assert a.untyped_storage().size() == b.untyped_storage().size() == 0
        torch.rand(3)
        leaves = [x, *inside.parameters(), *outside.parameters()]
        for leaf in leaves:
            leaf.grad = None
        y.square().sum().backward()
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    for found, expected in zip(grads(True), grads(False), strict=True):
        assert torch.equal(found, expected)
    with pytest.raises(ConfigError, match="fp8"):
        use("tensor_parallel", "CheckpointWithoutOutput")(fp8=True)
    with torch.no_grad():
        assert use("tensor_parallel", "CheckpointWithoutOutput")().checkpoint(part, x, 2.0)[1].equal(2 * x)


def test_further_tokens() -> None:
    roll, offset, scaler, helper = use(
        "transformer.multi_token_prediction",
        "roll_tensor", "get_mtp_layer_offset", "MTPLossAutoScaler", "MTPLossLoggingHelper",
    )  # fmt: skip
    x = torch.arange(1, 13.0).view(2, 6)
    rolled, total = roll(x, shifts=-1, dims=-1)
    assert rolled.tolist() == [[2, 3, 4, 5, 6, 0], [8, 9, 10, 11, 12, 0]] and total == rolled.sum()
    assert torch.equal(roll(x.T, dims=0)[0].T, rolled)
    documents = use("packed_seq_params", "PackedSeqParams")(
        cu_seqlens_q=torch.tensor([0, 2, 6]), cu_seqlens_kv=torch.tensor([0, 2, 6])
    )
    assert roll(x[:1], packed_seq_params=documents)[0].tolist() == [[2, 0, 4, 5, 6, 0]]
    with pytest.raises(ConfigError, match="shifts=1"):
        roll(x, shifts=1)
    assert offset(TransformerConfig(**SHAPE, mtp_num_layers=1), None) == 0
    for kind in (scaler, use("transformer.moe.router", "MoEAuxLossAutoScaler")):
        leaf, weight = torch.ones(3, requires_grad=True), torch.ones((), requires_grad=True)
        kind.set_loss_scale(torch.tensor(0.25))
        kind.apply(leaf * 1, weight * 2).sum().backward()
        assert leaf.grad is not None and leaf.grad.tolist() == [1, 1, 1] and weight.grad == 0.5
        kind.set_loss_scale(1.0)
    written: list[Any] = []
    helper.save_loss_to_tracker(torch.tensor(2.0), 1, 2, avg_group=ProcessGroupCollection.current().dp)
    helper.save_loss_to_tracker(torch.tensor(3.0), 1, 2)
    assert helper.tracker["values"].tolist() == [0, 5]
    totals: dict[str, Any] = {}
    helper.track_mtp_metrics(0.5, 7, SimpleNamespace(add_scalar=lambda *a: written.append(a)), None, totals)
    assert totals == {"mtp_1 loss": 0.0, "mtp_2 loss": 2.5} and written[1] == ("mtp_2 loss", 2.5, 7)
    assert helper.tracker["values"].tolist() == [0, 0]
    helper.tracker.clear()


def test_pipelines() -> None:
    table, shapes = use("pipeline_parallel.schedules", "get_schedule_table", "get_tensor_shapes")
    assert table(3, 2, 2) == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]
    config = TransformerConfig(**SHAPE)
    tp = SimpleNamespace(size=lambda: 2)
    asked: dict[str, Any] = {"seq_length": 16, "micro_batch_size": 3, "config": config, "decoder_seq_length": None}
    assert shapes(**asked, tp_group=tp, cp_group=tp) == [(8, 3, 72)] and shapes(**asked) == [(16, 3, 72)]
    first, last = use("pipeline_parallel.utils", "is_vp_first_stage", "is_vp_last_stage")
    answers = [
        (first(vp_stage=stage, vp_size=size), last(stage, size)) for stage, size in ((None, None), (0, 2), (1, 2))
    ]
    assert answers == [(True, True), (True, False), (False, True)]
    kinds = use("transformer.enums", "LayerType")
    layouts = use("transformer.pipeline_parallel_layer_layout", "PipelineParallelLayerLayout")
    layout = layouts.from_str("Et|tt|t|mL", 2)
    assert layouts.get_num_stages_from_str("Et|tt|t|mL") == 4 and layout.virtual_pipeline_model_parallel_size == 2
    assert [layout.get_layer_offset(kinds.decoder, v, r) for v in (0, 1) for r in (0, 1)] == [0, 1, 3, 4]
    assert layout.get_num_layers_to_build(vp_stage=0, pp_rank=1) == 2 and layout.get_layer_id_list(pp_rank=1) == [1, 2]
    assert layouts([["embedding", "decoder"], [kinds.decoder, kinds.loss]], 2).layout[1] == [
        [kinds.decoder, kinds.loss]
    ]
    with pytest.raises(ConfigError, match="multiple of 3"):
        layouts("Et|tL", 3)


def test_ranks_and_groups() -> None:
    ranks = use("parallel_state", "RankGenerator")
    grid = ranks(tp=2, ep=1, dp=3, pp=2, cp=1, order="tp-cp-dp-pp", rank_offset=12)
    assert grid.get_ranks("tp")[:2] == [[12, 13], [14, 15]] and grid.get_ranks("pp")[0] == [12, 18]
    assert grid.get_ranks("dp")[1] == [13, 15, 17] and grid.get_ranks("tp-dp")[1] == list(range(18, 24))
    for options, sentence in (({"ep": 2, "cp": 2}, "one generator"), ({"order": "tp-pp"}, "every axis above 1")):
        with pytest.raises(ConfigError, match=sentence):
            ranks(**{"tp": 1, "ep": 1, "dp": 3, "pp": 1, "cp": 1, "order": "tp-cp-ep-dp-pp"} | options)
    size, rank, either = use("utils", "get_pg_size", "get_pg_rank", "get_tensor_model_parallel_group_if_none")
    assert (size(None), rank(None)) == (1, 0)
    current = ProcessGroupCollection.current()
    assert (
        either(None) is current.tp
        and either(None, is_expert=True) is current.expt_tp
        and either(current.dp) is current.dp
    )
    assert use("transformer.utils", "ensure_metadata_has_dp_cp_group")(None) == {"dp_cp_group": current.dp_cp}
    assert use("transformer.moe.moe_utils", "get_default_pg_collection")() is current


def test_tensors_of_modules_of_ones_own() -> None:
    make, default = use("transformer.utils", "make_sharded_tensors_for_checkpoint", "sharded_state_dict_default")
    one = use("utils", "make_tp_sharded_tensor_for_checkpoint")
    pretend(1, tp=2).set_current()
    weight = randn(4, 6)
    state = make({"weight": weight, "bias": randn(4), "_extra_state": None}, "p.", {"weight": 1}, ())
    assert set(state) == {"p.weight", "p.bias"}
    assert state["p.weight"].global_shape == (4, 12) and state["p.weight"].blocks[0].box == ((0, 4), (6, 6))
    assert state["p.bias"].global_shape == (4,)
    assert one(weight, "k", 0).blocks[0].box == ((4, 4), (0, 6))
    with pytest.raises(ConfigError, match="key of its own"):
        make({"weight": weight}, "", {}, ((0, 1, 2),))
    swiglu = use("transformer.mlp", "apply_swiglu_sharded_factory")(one(weight, "k", 0), ())
    assert [(block.box[0], block.local_box[0]) for block in swiglu.blocks] == [((2, 2), (0, 2)), ((6, 2), (2, 2))]
    plain = default(nn.Linear(6, 4), "q.", (), {})
    assert set(plain) == {"q.weight", "q.bias"} and plain["q.weight"].key == "q.weight"
    rename, several = use("dist_checkpointing.utils", "replace_prefix_for_sharding", "apply_prefix_mapping")
    rename(plain, "q.", "r.")
    several(plain, {"r.w": "s.w"})
    assert [plain["q.weight"].key, plain["q.bias"].key] == ["s.weight", "r.bias"]
    with pytest.raises(ValueError, match="does not begin with"):
        rename(plain, "t.", "u.")


def test_a_forwards_first_calls(tmp_path: Path) -> None:
    either, viewless, box = use("utils", "deprecate_inference_params", "make_viewless_tensor", "WrappedTensor")
    push, pop = use("utils", "nvtx_range_push", "nvtx_range_pop")
    assert either(None, None) is None and either(1, 2) == 1
    with pytest.warns(DeprecationWarning, match="inference_context"):
        assert either(None, 2) == 2
    leaf = torch.ones(2, requires_grad=True)
    assert viewless(inp=leaf, requires_grad=True, keep_graph=True) is leaf
    assert viewless(inp=leaf * 1, requires_grad=True, keep_graph=False).is_leaf
    wrapped = box(leaf)
    assert wrapped.unwrap() is leaf
    with pytest.raises(RuntimeError, match="empty"):
        wrapped.unwrap()
    with torch.profiler.profile() as profile:
        push(suffix="mlp")
        push("attention")
        pop("attention")
        pop(suffix="mlp")
    assert [event.key for event in profile.key_averages()] == ["test_a_forwards_first_calls.mlp", "attention"]
    with pytest.raises(RuntimeError, match="ends no open range"):
        pop("attention")
    is_on, log = use("config_logger", "has_config_logger_enabled", "log_config_to_disk")
    assert not is_on(TransformerConfig(**SHAPE))
    config = SimpleNamespace(config_logger_dir=str(tmp_path))
    assert is_on(config)
    log(config, {"self": leaf, "config": TransformerConfig(**SHAPE), "n": 3}, prefix="model")
    content = json.loads((tmp_path / "model.rank_0.json").read_text())
    assert content["n"] == 3 and content["config"]["hidden_size"] == 72
    function: Callable[[int], int] = use("jit", "jit_fuser")(lambda n: n + 1)
    assert use("typed_torch", "apply_module")(function)(1) == 2


def test_what_watches_a_loop() -> None:
    data, machine_of, destroy = use(
        "rerun_state_machine", "RerunDataIterator", "get_rerun_state_machine", "destroy_rerun_state_machine"
    )
    batches = data([1, 2])
    assert list(batches) == [1, 2] and batches.iterable == [1, 2]
    machine, steps = machine_of(), 0
    assert machine is machine_of()
    for _ in range(2):
        while machine.should_run_forward_backward(batches):
            steps += 1
    assert steps == 2 and machine.should_checkpoint_and_exit() == (False, False, 0)
    machine.validate_result(
        result=torch.tensor(1.0), rejection_func=torch.isnan, message="nan", tolerance=0.0, fatal=True
    )
    with pytest.raises(RuntimeError, match="found NaN: nan"):
        machine.validate_result(torch.tensor(math.nan), torch.isnan, "found NaN")
    with pytest.warns(UserWarning, match="found NaN"):
        machine.validate_result(torch.tensor(math.nan), torch.isnan, "found NaN", fatal=False)
    destroy()
    assert machine_of() is not machine
    detector = use("utils", "StragglerDetector")()
    with detector(bdata=True):
        pass
    assert detector is use("utils", "StragglerDetector")() and detector.report() is False
    with pytest.raises(UnsupportedError, match="--log-straggler"):
        detector.configure(4, 1)


def test_products() -> None:
    x, weight, bias = randn(5, 2, 6).requires_grad_(), randn(4, 6).requires_grad_(), randn(4)
    frozen = use("tensor_parallel.layers", "linear_with_frozen_weight")
    tp = ProcessGroupCollection.current().tp
    output = frozen(
        input=x, weight=weight, bias=bias, gradient_accumulation_fusion=False, allreduce_dgrad=True,
        sequence_parallel=False, tp_group=tp,
    )  # fmt: skip
    torch.testing.assert_close(output, F.linear(x, weight, bias))
    output.sum().backward()
    assert weight.grad is None and x.grad is not None
    gather = use("tensor_parallel", "all_gather_last_dim_from_tensor_parallel_region")
    assert torch.equal(gather(x, group=tp), x)
    assert use("tensor_parallel.random", "get_expert_parallel_rng_tracker_name")() == "expert-parallel-rng"


def test_marks() -> None:
    fill, mark, counts = use(
        "tensor_parallel",
        "set_defaults_if_not_set_tensor_model_parallel_attributes", "set_tensor_model_parallel_attributes",
        "param_is_not_tensor_parallel_duplicate",
    )  # fmt: skip
    whole, divided = nn.Parameter(randn(2)), nn.Parameter(randn(2))
    mark(divided, True, 1, 1)
    for param in (whole, divided):
        fill(param)
    assert [whole.tensor_model_parallel, whole.partition_dim, whole.partition_stride] == [False, -1, 1]  # type: ignore[attr-defined]
    assert [divided.tensor_model_parallel, divided.partition_dim] == [True, 1]  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="marks already"):
        mark(divided, True, 0, 1)
    first, second = SimpleNamespace(rank=lambda: 0), SimpleNamespace(rank=lambda: 1)
    assert [counts(x, g) for x in (whole, divided) for g in (first, second)] == [True, False, True, True]


def test_strategies(tmp_path: Path) -> None:
    save, load, strict = use(
        "dist_checkpointing.serialization",
        "get_default_save_sharded_strategy", "get_default_load_sharded_strategy", "StrictHandling",
    )  # fmt: skip
    whole = use("dist_checkpointing.strategies.fully_parallel", "FullyParallelSaveStrategyWrapper")
    tensor = use("dist_checkpointing.mapping", "ShardedTensor")
    strategy = whole(save("torch_dist"), ProcessGroupCollection.current().dp, True)
    checkpointing = use("dist_checkpointing", "save", "load")
    checkpointing[0]({"a": tensor.whole("a", randn(3)), "n": 4}, tmp_path / "c", sharded_strategy=strategy)
    wanted = {"a": tensor.whole("a", torch.zeros(3))}
    found = checkpointing[1](wanted, tmp_path / "c", sharded_strategy=load(tmp_path / "c"), strict=strict.LOG_ALL)
    assert torch.equal(found["a"], randn(3)) and found["n"] == 4
    with pytest.raises(ConfigError, match="zarr"):
        save("zarr")


def test_one_class_for_several() -> None:
    latent = use("transformer", "MLATransformerConfig")
    assert latent is MLATransformerConfig and issubclass(latent, TransformerConfig)
    adam, options = use("optimizer", "AdamOptimizerConfig", "OptimizerConfig")
    assert adam is options and "lr_mult" in use("optimizer", "param_group_identifier_keys")
    assert use("optimizer", "Adam") is use("optimizer.distrib_optimizer", "Adam") is use("optimizer", "CPUAdam")
    before, after, split, rank = use(
        "parallel_state", "is_pipeline_stage_before_split", "is_pipeline_stage_after_split",
        "get_pipeline_model_parallel_split_rank", "get_tensor_and_context_parallel_rank",
    )  # fmt: skip
    assert before() and after() and split() is None and rank() == 0


def test_specs() -> None:
    provider = use("extensions.transformer_engine_spec_provider", "TESpecProvider")()
    layers = use(
        "extensions.transformer_engine", "TEColumnParallelLinear", "TERowParallelLinear", "TEDotProductAttention"
    )
    assert (provider.column_parallel_linear(), provider.row_parallel_linear(), provider.core_attention()) == tuple(
        layers
    )
    assert provider.fuse_layernorm_and_linear() and provider.layer_norm(rms_norm=True, for_qk=True) is not None
    spec = use("post_training.modelopt.gpt.model_specs", "get_gpt_modelopt_spec")
    config = TransformerConfig(**SHAPE)
    mask = use("transformer.enums", "AttnMaskType")
    built = spec(config=config, local_core_attention=False, remap_te_layernorm=False, use_arbitrary_attention_mask=True)
    assert built.submodules.self_attention.params["attn_mask_type"] == mask.arbitrary
    with pytest.raises(ConfigError, match="real_quant_cfg"):
        spec(config, real_quant_cfg="nvfp4")
    linear = use("post_training.modelopt.layers", "Linear")
    layer = linear(72, 8, config=config, init_method=nn.init.zeros_, bias=False, gather_output=False, stride=1)
    assert layer.weight.shape == (8, 72) and not layer.weight.any()
    with pytest.raises(ConfigError, match="disable_grad_reduce"):
        linear(72, 8, config=config, init_method=nn.init.zeros_, disable_grad_reduce=True)
    factor = use("models.common.embeddings.yarn_rotary_pos_embedding", "_yarn_get_concentration_factor_from_config")
    assert factor(config) == 1.0
    yarn = SimpleNamespace(yarn_rotary_scaling_factor=4.0, yarn_mscale=1.0, yarn_mscale_all_dim=0.0)
    assert factor(yarn) == pytest.approx(0.1 * math.log(4) + 1)
    muon = use("optimizer.muon", "get_megatron_muon_optimizer")
    with pytest.raises(ConfigError, match="muon"):
        muon(SimpleNamespace(optimizer="adam"), [])


@pytest.mark.parametrize(
    "module", ["transformer.attention", "transformer.transformer_block", "models.common.embeddings.rope_utils"]
)
def test_star_imports(module: str) -> None:
    space: dict[str, Any] = {}
    exec(f"from megatron.core.{module} import *", space)
    wanted = "torch Tensor Optional Union deprecate_inference_params nvtx_range_push HAVE_FA3 TransformerConfig".split()
    assert set(wanted) <= set(space) and space["torch"] is torch
    own = {"transformer.attention": "SelfAttention", "transformer.transformer_block": "TransformerBlock"}
    assert own.get(module, "apply_rotary_pos_emb") in space
    # Replaced where they are looked up.
    assert space["HAVE_FA3"] is False and callable(space["deprecate_inference_params"])

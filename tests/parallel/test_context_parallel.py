# SPDX-License-Identifier: Apache-2.0
"""Context parallelism on gloo ranks against one process: attention by every exchange, and whole training steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.collectives import all_gather_object, all_reduce
from megatron.core.context_parallel.sharding import get_batch_on_this_cp_rank, shard_sequence
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.errors import ConfigError
from megatron.core.mesh import RankGrid
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.megatron_optimizer import get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.packed_seq_params import PackedSeqParams, pack_batch
from megatron.core.pipeline_parallel.executor import Executor
from megatron.core.pipeline_parallel.schedules import one_f_one_b
from megatron.core.placement import get_placement
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.core_attention.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.flags.read import read_run_config
from megatron.training.launch.initialize import build_rank_grid
from tests.parallel.harness import run_distributed
from tests.support.sequence_shards import join_sequence

VOCABULARY, LENGTH, BATCH, STEPS, MICROBATCHES = 32, 16, 2, 4, 2
LLAMA = {
    "normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": "silu", "num_query_groups": 2,
    "add_bias_linear": False,
}  # fmt: skip
Layout = dict[str, Any]


def build_groups(layout: Layout) -> ProcessGroupCollection:
    world = dist.get_world_size() if dist.is_initialized() else 1
    sizes = {"tp": layout.get("tp", 1), "cp": layout.get("cp", 1), "cp_levels": tuple(layout.get("levels", ()))}
    return ProcessGroupCollection.build(RankGrid(world, **sizes), dist.get_rank() if world > 1 else 0)


def model_config(layout: Layout, **changes: Any) -> TransformerConfig:
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 24}
    return TransformerConfig(
        **sizes | {"hidden_dropout": 0.0, "attention_dropout": 0.0} | changes,
        tensor_model_parallel_size=layout.get("tp", 1), sequence_parallel=layout.get("sp", False),
        context_parallel_size=layout.get("cp", 1), cp_comm_type=layout.get("comm", ["p2p"]),
        hierarchical_context_parallel_sizes=layout.get("levels"),
    )  # fmt: skip


# ---- attention alone


def attention_worker(layout: Layout, heads: int, groups: int, backend: str, seen: str) -> dict[str, Tensor]:
    """Output and gradients of the whole sequence, put together from all ranks. seen: causal, mask or documents."""
    collection = build_groups(layout)
    rank, size = collection.cp.rank(), collection.cp.size()
    config = model_config(
        layout, num_attention_heads=heads, num_query_groups=groups, kv_channels=8, attention_backend=backend
    )
    attention = DotProductAttention(config, 1, pg_collection=collection)
    torch.manual_seed(1)
    shapes = {"query": heads, "key": groups, "value": groups, "grad": heads}
    batch = 1 if seen == "documents" else BATCH
    whole = {name: torch.randn(LENGTH, batch, count, 8) for name, count in shapes.items()}
    mask = (torch.rand(BATCH, 1, LENGTH, LENGTH) < 0.3).triu(1) | torch.ones(LENGTH, LENGTH).triu(4).bool()
    own = {name: shard_sequence(x, rank, size).requires_grad_() for name, x in whole.items()}
    visible = {
        "causal": {},
        "mask": {"attention_mask": shard_sequence(mask, rank, size, dim=2)},
        "documents": {"packed_seq_params": PackedSeqParams(cu_seqlens_q=torch.tensor(BOUNDS))},
    }
    output = attention(own["query"], own["key"], own["value"], **visible[seen])
    output.backward(own["grad"].flatten(2))
    parts = {"output": output.detach()} | {name: own[name].grad for name in ("query", "key", "value")}
    return {name: join_sequence(all_gather_object(part, collection.cp)) for name, part in parts.items()}


EXCHANGES = {
    "p2p": {"cp": 2, "comm": ["p2p"]},
    "all_gather": {"cp": 2, "comm": ["all_gather"]},
    "a2a": {"cp": 2, "comm": ["a2a"]},
    "p2p of 4": {"cp": 4, "comm": ["p2p"]},
    "all_gather of 4": {"cp": 4, "comm": ["all_gather"]},
    "a2a of 4": {"cp": 4, "comm": ["a2a"]},
    "a2a+p2p": {"cp": 4, "comm": ["a2a+p2p"], "levels": [2, 2]},
    "a2a+p2p, only a ring": {"cp": 2, "comm": ["a2a+p2p"], "levels": [1, 2]},
    "a2a+p2p, no ring": {"cp": 2, "comm": ["a2a+p2p"], "levels": [2, 1]},
}


# (heads, key-value heads, backend, what is seen): 3 key-value heads are not divisible by the ranks, 2 and 1 are fewer
# than 4 of them.
CASES = [
    (4, 4, "auto", "causal"),
    (4, 2, "auto", "causal"),
    (12, 3, "auto", "causal"),
    (4, 1, "local", "causal"),
    (4, 2, "unfused", "mask"),
    (4, 4, "local", "mask"),
    (4, 2, "auto", "documents"),
    (4, 4, "unfused", "documents"),
]
BOUNDS = (0, 3, 4, 11, 12, LENGTH)
"""Documents within a piece, over pieces of several ranks, and of one token."""


def all_attention_cases(layout: Layout) -> list[dict[str, Tensor]]:
    return [attention_worker(layout, *case) for case in CASES]


@pytest.mark.parametrize("name", EXCHANGES)
def test_attention_equals_one_process(name: str) -> None:
    layout = EXCHANGES[name]
    expected = all_attention_cases({})
    for found in run_distributed(all_attention_cases, layout["cp"], layout):
        for case, ours, theirs in zip(CASES, found, expected, strict=True):
            for tensor, value in theirs.items():
                torch.testing.assert_close(
                    ours[tensor], value, rtol=1e-4, atol=1e-5, msg=lambda m, where=(case, tensor): f"{where}: {m}"
                )


# ---- training


def batches(step: int) -> list[dict[str, Tensor]]:
    """A step's microbatches; in some of them only tokens of one end of the sequence count, in one none at all."""
    found = []
    for index in range(MICROBATCHES):
        generator = torch.Generator().manual_seed(100 * step + index)
        ids = torch.randint(VOCABULARY // 3, (BATCH, LENGTH + 1), generator=generator)
        mask = (torch.rand(BATCH, LENGTH, generator=generator) < 0.7).float()
        if step == 1:
            mask[:, 2:] = 0.0  # tokens of the first rank only
        if step == 2 and index == 1:
            mask[:] = 0.0
        positions = torch.arange(LENGTH).expand(BATCH, -1)
        found.append({"tokens": ids[:, :-1], "labels": ids[:, 1:], "loss_mask": mask, "position_ids": positions})
    return found


def forward_step(iterator: Any, model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    batch, packed = pack_batch(next(iterator))
    batch = get_batch_on_this_cp_rank(batch, model.groups.cp)
    output = model(batch["tokens"], batch["position_ids"], labels=batch["labels"], packed_seq_params=packed)

    def loss_func(output: Tensor) -> Any:
        total, count = (output * batch["loss_mask"]).sum(), batch["loss_mask"].sum()
        return total, count, {"lm loss": torch.stack([total.detach(), count])}

    return output, loss_func


def with_documents(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The samples' tokens in documents, positions beginning anew at each."""
    bounds, starts = [0, 5, 6, LENGTH], torch.tensor([0] * 5 + [5] + [6] * (LENGTH - 6))
    padded = torch.tensor(bounds + [LENGTH] * 3, dtype=torch.int32)
    return batch | {"position_ids": batch["position_ids"] - starts, "cu_seqlens": padded.expand(BATCH, -1)}


def train(style: str, layout: Layout, packed: bool = False) -> dict[str, Any]:
    """Losses, gradient norms, and the trained weights by name: the full ones, joined from all ranks."""
    groups = build_groups(layout)
    llama = style == "llama"
    config = model_config(layout, **(LLAMA if llama else {}))
    module = GPTModel(
        config, get_gpt_layer_local_spec(), VOCABULARY, LENGTH, share_embeddings_and_output_weights=not llama,
        position_embedding_type="rope" if llama else "learned_absolute", pg_collection=groups,
    )  # fmt: skip
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), module, pg_collection=groups)
    # The gradient of a key's bias is rounding alone (softmax is shift-invariant): an epsilon above it keeps it from
    # deciding the direction of an update.
    settings = OptimizerConfig(lr=0.01, clip_grad=1.0, adam_eps=1e-5)
    optimizer = get_megatron_optimizer(settings, [model], pg_collection=groups)
    executor = Executor([model], groups, config)
    losses, norms = [], []
    for step in range(STEPS):
        model.zero_grad_buffer()
        data = [with_documents(batch) if packed else batch for batch in batches(step)]
        outputs = executor.run(one_f_one_b(0, 1, MICROBATCHES), forward_step, iter(data))
        finalize_model_grads([model], pg_collection=groups)
        norms.append(float(optimizer.step().grad_norm))
        total = torch.stack([entry["lm loss"] for entry in outputs.loss_dicts]).sum(0)
        all_reduce(total, groups.dp_cp)
        losses.append(float(total[0] / total[1]))
    weights = {}
    for name, param in module.named_parameters():
        placement = get_placement(param)
        shards = all_gather_object(param.detach(), groups.tp)
        weights[name] = placement.join(shards) if placement.splits else param.detach()
    return {"losses": losses, "norms": norms, "weights": weights}


LAYOUTS = {
    "cp2 p2p": {"cp": 2, "comm": ["p2p"]},
    "cp2 all_gather": {"cp": 2, "comm": ["all_gather"]},
    "cp2 a2a": {"cp": 2, "comm": ["a2a"]},
    "cp2, another exchange in each layer": {"cp": 2, "comm": ["a2a", "p2p"]},
    "cp4 p2p": {"cp": 4, "comm": ["p2p"]},
    "cp4 a2a+p2p": {"cp": 4, "comm": ["a2a+p2p"], "levels": [2, 2]},
    "tp2 cp2": {"tp": 2, "cp": 2, "comm": ["p2p"]},
    "tp2 sp cp2": {"tp": 2, "sp": True, "cp": 2, "comm": ["p2p"]},
    "tp2 sp cp2 a2a": {"tp": 2, "sp": True, "cp": 2, "comm": ["a2a"]},
}


@pytest.mark.parametrize("style", ["gpt2", "llama"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_training_equals_one_process(name: str, style: str) -> None:
    layout = LAYOUTS[name]
    expected = train(style, {})
    for found in run_distributed(train, layout["cp"] * layout.get("tp", 1), style, layout):
        assert_same_training(found, expected)


def assert_same_training(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    for weight, value in expected["weights"].items():
        torch.testing.assert_close(
            found["weights"][weight], value, rtol=1e-4, atol=1e-5, msg=lambda m, n=weight: f"{n}: {m}"
        )


@pytest.mark.parametrize(
    ("name", "style"),
    [("cp2 p2p", "gpt2"), ("cp2 all_gather", "llama"), ("cp2 a2a", "llama"), ("cp4 a2a+p2p", "gpt2"),
     ("tp2 sp cp2", "llama")],
)  # fmt: skip
def test_training_on_packed_documents_equals_one_process(name: str, style: str) -> None:
    layout = LAYOUTS[name]
    expected = train(style, {}, packed=True)
    assert expected["losses"] != pytest.approx(train(style, {})["losses"], rel=1e-3)
    for found in run_distributed(train, layout["cp"] * layout.get("tp", 1), style, layout, packed=True):
        assert_same_training(found, expected)


# ---- from the command line

MODEL = """
    --num-layers 2 --hidden-size 32 --seq-length 16 --max-position-embeddings 16 --micro-batch-size 1 --train-iters 1
    --lr 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 30 --attention-dropout 0
"""


def exchanges_of_layers(flags: str) -> list[str]:
    """What attention calls itself in each layer."""
    world = dist.get_world_size()
    config = read_run_config([*MODEL.split(), *flags.split()], {"WORLD_SIZE": str(world)})
    groups = ProcessGroupCollection.build(build_rank_grid(config, world), dist.get_rank())
    return [DotProductAttention(config.model, layer, pg_collection=groups).backend.name for layer in (1, 2)]


RING, GATHER, EXCHANGE = "passed around {} ranks", "gathered from {} ranks", "exchanged for heads among {} ranks"


@pytest.mark.flags("--context-parallel-size", "--cp-comm-type", "--hierarchical-context-parallel-sizes")
@pytest.mark.parametrize(
    ("world", "flags", "layers"),
    [
        (2, "--context-parallel-size 2", [[RING.format(2)]] * 2),
        (4, "--context-parallel-size 2 --cp-comm-type all_gather", [[GATHER.format(2)]] * 2),
        (4, "--context-parallel-size 4 --cp-comm-type p2p a2a", [[RING.format(4)], [EXCHANGE.format(4)]]),
        (
            4,
            "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
            [[EXCHANGE.format(2), RING.format(2)]] * 2,
        ),
        (
            4,
            "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 4 1",
            [[EXCHANGE.format(4)]] * 2,
        ),
    ],
)
def test_flags_choose_the_exchange(world: int, flags: str, layers: list[list[str]]) -> None:
    for names in run_distributed(exchanges_of_layers, world, f"--num-attention-heads 4 {flags}"):
        for name, words in zip(names, layers, strict=True):
            assert all(word in name for word in words), name
            assert sum(word[:6] in name for word in ("passed around", "gathered", "exchanged")) == len(words), name


REFUSED = {
    "--num-attention-heads 2 --cp-comm-type a2a": r"a2a with --context-parallel-size 4 needs a multiple of 4 query "
    r"heads .* use 4 heads, or --cp-comm-type p2p",
    "--num-attention-heads 3 --kv-channels 8 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2": (
        r"a2a\+p2p with --hierarchical-context-parallel-sizes 2 2 needs a multiple of 2 query heads"
    ),
    "--num-attention-heads 4 --cp-comm-type a2a+p2p": "--hierarchical-context-parallel-sizes, two numbers",
    "--num-attention-heads 4 --cp-comm-type carrier_pigeon": "use p2p, all_gather, a2a or a2a",
    "--num-attention-heads 4 --seq-length 12": r"not divisible by 2 x --context-parallel-size 4 .* use 8 or 16 tokens",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_what_cannot_be_is_refused_before_any_process_group(flags: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[flags]):
        read_run_config([*MODEL.split(), "--context-parallel-size", "4", *flags.split()], {"WORLD_SIZE": "4"})


def construct_with_two_heads() -> str:
    """The sentence for users who build the model themselves."""
    config = model_config({"comm": "a2a"}, num_attention_heads=2)
    with pytest.raises(ConfigError) as error:
        DotProductAttention(config, 1, pg_collection=build_groups({"cp": 4}))
    return str(error.value)


def test_heads_that_cannot_be_shared_are_refused_by_the_layer() -> None:
    for sentence in run_distributed(construct_with_two_heads, 4):
        assert "--context-parallel-size 4 needs a multiple of 4 query heads on each tensor-parallel rank" in sentence


def outputs_with_dropout() -> list[Tensor]:
    """In evaluation, then twice in training, and without dropout."""
    groups = build_groups({"cp": 2})
    attention = DotProductAttention(model_config({"cp": 2}, attention_dropout=0.5), 1, pg_collection=groups)
    torch.manual_seed(5)
    q, k, v = (torch.randn(8, 1, 4, 8) for _ in range(3))
    plain = DotProductAttention(model_config({"cp": 2}), 1, pg_collection=groups)
    return [attention.eval()(q, k, v), attention.train()(q, k, v), attention(q, k, v), plain(q, k, v)]


def test_attention_dropout_in_the_ring() -> None:
    for evaluated, first, second, plain in run_distributed(outputs_with_dropout, 2):
        torch.testing.assert_close(evaluated, plain)
        assert not torch.allclose(evaluated, first)
        assert not torch.allclose(first, second)
        assert first.isfinite().all()

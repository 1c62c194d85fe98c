# SPDX-License-Identifier: Apache-2.0
"""Parameters counted from the placements of a model that is built without memory, as any rank of any layout."""

from __future__ import annotations

import itertools
import json
import math
import shlex
from pathlib import Path

import pytest

from megatron.core.errors import ConfigError
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.placement import get_placement
from megatron.core.plan.stages import build_pipeline_layout, build_virtual_stages
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.planner.adapter_memory import count_adapters
from megatron.planner.memory import count_parameters
from megatron.planner.parameters import count_on_rank, count_whole
from megatron.planner.state_memory import Elements, count_state_bytes
from megatron.training.config.container import RunConfig
from megatron.training.flags.read import read_run_config
from megatron.training.launch.initialize import build_rank_grid
from megatron.training.recipes.gpt import build_gpt_model, build_gpt_recipe, describe_gpt_workload
from tests.parallel.small_training import COMMON, EXPERTS, OPTIONS, STYLES
from tests.support.gpt_models import build_model
from tests.support.run_flags import run_config
from tests.trial.random_layouts import draw_case

AXES = [f"--{axis}-parallel-size" for axis in ("tensor-model", "context", "pipeline-model")]
CASES = json.loads((Path(__file__).parents[2] / "golden" / "data" / "flops_memory.json").read_text())


def read_case(name: str, further: str = "") -> RunConfig:
    case = CASES[name]
    config = read_run_config([*shlex.split(case["cli"]), *further.split()], {"WORLD_SIZE": str(case["world_size"])})
    config.model.init_model_with_meta_device = True
    return config


def build_stage(config: RunConfig, rows: int, rank: int, chunk: int = 0) -> GPTModel:
    """A chunk of a rank, on the meta device."""
    groups = ProcessGroupCollection.pretend(build_rank_grid(config, config.world_size), rank)
    shape = build_virtual_stages(config.model)
    content = build_pipeline_layout(config.model, shape)[shape.index(groups.pp.rank(), chunk)]
    part = build_gpt_model(
        config,
        rows,
        pre_process=content.has_embedding,
        post_process=content.has_loss,
        vp_stage=chunk if shape.chunks > 1 else None,
        pg_collection=groups,
    )
    assert {param.device.type for param in part.parameters()} <= {"meta"}
    return part


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--ffn-hidden-size 33 --tensor-model-parallel-size 2", "--ffn-hidden-size 33 cannot .* use 32 or 34"),
        ("--swiglu --hidden-size 24 --num-attention-heads 3 --tensor-model-parallel-size 3", "use 63 or 66"),
        ("--num-experts 2 --moe-ffn-hidden-size 7 --disable-bias-linear --expert-tensor-parallel-size 2 "
         "--tensor-model-parallel-size 2", "--moe-ffn-hidden-size 7 cannot be split over --expert-tensor"),
        ("--num-experts 2 --moe-shared-expert-intermediate-size 7 --disable-bias-linear "
         "--tensor-model-parallel-size 2", "--moe-shared-expert-intermediate-size 7 cannot be split over --tensor"),
        ("--padded-vocab-size 71 --tensor-model-parallel-size 2", "use --padded-vocab-size 72"),
        ("--attention-backend fused --window-size 7,0", "the cuDNN kernel has no sliding window"),
        ("--attention-backend unfused --softmax-type learnable", "torch's math kernel has no attention sinks"),
        ("--attention-backend fused --context-parallel-size 2", "cannot merge the blocks of --cp-comm-type p2p"),
        ("--cp-comm-type a2a+p2p --context-parallel-size 2 --hierarchical-context-parallel-sizes 2",
         "--hierarchical-context-parallel-sizes, two numbers"),
        ("--num-layers 4 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
         "--rampup-batch-size 3 2 40 --global-batch-size 13",
         r"--rampup-batch-size 3 2 40 has global batch size 3: 3 microbatches in groups of 2 .*, as do 4 more of its "
         r"sizes, up to 11\b"),
        ("--split 0,100,0", "--split 0,100,0 leaves no documents for training; .* --skip-train"),
    ],
)  # fmt: skip
def test_what_no_rank_could_build_is_refused_by_the_flags(flags: str, sentence: str) -> None:
    """Before a job is launched: --print-config on any machine finds it."""
    words = flags.split()
    processes = math.prod(int(words[i + 1]) for i, word in enumerate(words) if word in AXES)
    with pytest.raises(ConfigError, match=sentence):
        run_config(flags, world_size=processes)


def test_experts_in_every_layer_need_no_width_of_the_mlp() -> None:
    experts = "--num-experts 2 --moe-ffn-hidden-size 6 --ffn-hidden-size 7 --disable-bias-linear"
    flags = f"{experts} --tensor-model-parallel-size 2 --sequence-parallel"
    assert run_config(flags, world_size=2).model.ffn_hidden_size == 7
    with pytest.raises(ConfigError, match="--ffn-hidden-size 7 cannot be split"):
        run_config(f"{flags} --num-layers 2 --moe-layer-freq 2", world_size=2)


def test_what_the_flags_accept_every_rank_can_build() -> None:
    """Random layouts of odd sizes, as their first, a middle and the last rank see them."""
    built = 0
    for seed in range(30):
        case = draw_case(seed)
        try:
            config = read_run_config(case.divided, {"WORLD_SIZE": str(case.world_size)})
        except ConfigError:
            continue
        config.model.init_model_with_meta_device = True
        rows = build_gpt_recipe(config).padded_vocab_size
        shape = build_virtual_stages(config.model)
        for rank in {0, case.world_size // 2, case.world_size - 1}:
            for chunk in range(shape.chunks):
                build_stage(config, rows, rank, chunk)
        built += 1
    assert built > 20


@pytest.mark.parametrize("name", ["gpt3_small", "gpt3_175b_tp8pp16", "llama3_8b", "tiny_b", "mixtral_8x7b"])
def test_the_formula_of_the_reference_agrees_with_placements(name: str) -> None:
    """On all stages of the layout together, and on the first stage's first rank; biases and positions are not in it."""
    config, rows = read_case(name), 51200
    model, untied = config.model, config.gpt.untie_embeddings_and_output_weights
    formula = count_parameters(model, padded_vocab_size=rows, untied=untied)
    groups = ProcessGroupCollection.pretend(build_rank_grid(config, config.world_size), 0)
    stages = groups.pp.size()
    ranks_of_a_pipeline = range(0, config.world_size, config.world_size // stages)
    chunks = [build_stage(config, rows, rank) for rank in ranks_of_a_pipeline]
    assert [chunk.pg_collection.pp.rank() for chunk in chunks] == list(range(stages))
    counts = count_whole(get_placement(param) for chunk in chunks for param in chunk.parameters())
    experts = counts.of_experts.get("matrix", 0)
    assert counts["matrix"] == formula.decoder.matrices
    assert experts == formula.decoder.expert_matrices
    assert counts["norm"] + counts["router"] == formula.decoder.replicated
    assert (counts["embedding"], counts["head"]) == (formula.embedding, formula.output_layer)
    if model.num_moe_experts:
        idle = counts.total - counts.count_active(model.moe_router_topk, model.num_moe_experts)
        assert idle == formula.idle
    assert counts.total - formula.total == counts["vector"] + counts["positions"]
    first = count_on_rank(chunks[:1])
    ep, etp = model.expert_model_parallel_size, model.expert_tensor_parallel_size or model.tensor_model_parallel_size
    assert first["matrix"] * stages * model.tensor_model_parallel_size == formula.decoder.matrices
    assert first.of_experts.get("matrix", 0) * stages * ep * etp == formula.decoder.expert_matrices
    assert first["embedding"] * model.tensor_model_parallel_size == formula.embedding


def test_copies_count_where_they_lie_and_not_in_the_model() -> None:
    flags = "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 1 --num-layers 2"
    config = read_run_config(
        f"{flags} --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --mock-data "
        "--micro-batch-size 1 --train-iters 1 --lr 1 --tokenizer-type NullTokenizer --vocab-size 63".split(),
        {"WORLD_SIZE": "2"},
    )
    config.model.init_model_with_meta_device = True
    first, last = (build_stage(config, 64, rank) for rank in range(2))
    assert count_on_rank([last])["head"] == count_on_rank([first])["embedding"] == 64 * 32
    whole = count_whole(get_placement(param) for param in itertools.chain(first.parameters(), last.parameters()))
    assert (whole["head"], whole["embedding"]) == (0, 64 * 32)
    model = build_model()
    assert whole.total == count_on_rank([model]).total == sum(param.numel() for param in model.parameters())


def test_active_parameters_are_the_share_that_the_router_chooses() -> None:
    model = build_model("--num-experts 8 --moe-ffn-hidden-size 16 --moe-router-topk 2")
    counts = count_on_rank([model])
    assert set(counts.of_experts) == {"matrix", "vector"}
    in_experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    assert counts.count_active(2, 8) == counts.total - in_experts * 3 // 4


@pytest.mark.parametrize(
    ("style", "further"),
    [
        ("llama", "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --lora-type dora"),
        ("llama", "--tensor-model-parallel-size 4 --lora-target-modules v_proj gate_proj *.layers.1.*.linear_proj"),
        ("latent", "--tensor-model-parallel-size 2 --sequence-parallel --lora-exclude linear_kv_up_proj"),
        ("moe", "--lora-exclude *.experts.* --lora-type rslora"),
        ("picky", "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 2"),
    ],
)
def test_adapters_are_counted_as_a_rank_has_them(style: str, further: str) -> None:
    flags = f"{COMMON} {(STYLES | OPTIONS | EXPERTS)[style]} --lora-rank 3 {further}".split()
    processes = math.prod(int(flags[i + 1]) for i, word in enumerate(flags) if word in AXES)
    config = read_run_config(flags, {"WORLD_SIZE": str(processes)})
    config.model.init_model_with_meta_device = True
    contents = build_pipeline_layout(config.model, build_virtual_stages(config.model))
    for rank in range(0, processes, config.model.tensor_model_parallel_size):
        stage = rank // config.model.tensor_model_parallel_size
        built = build_stage(config, 128, rank)
        trained = sum(parameter.numel() for parameter in built.parameters() if parameter.requires_grad)
        assert sum(count_adapters(config.model, [contents[stage]])) == trained > 0


def test_adapters_alone_have_gradients_and_state() -> None:
    config = read_run_config(f"{COMMON} {STYLES['llama']} --lora-rank 3 --bf16".split(), {})
    work = describe_gpt_workload(config, 128)
    # A weight of 2 bytes; of an adapter also a gradient and a main weight in float32, and two moments.
    counted = count_state_bytes(
        config.model, config.ddp, config.optimizer, work, Elements(1000.0, 0.0, 0.0), (10.0, 0.0)
    )
    assert counted == 1000 * 2 + 10 * (2 + 4 + 4 + 4 + 4)

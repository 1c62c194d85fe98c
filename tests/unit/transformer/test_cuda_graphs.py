# SPDX-License-Identifier: Apache-2.0
"""Layers as CUDA graphs: the same losses, gradients and random numbers as without, by a stand-in that runs on a CPU."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron.core.auxiliary_loss import find_auxiliary_loss_scales
from megatron.core.device_graphs import Recorder
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.errors import ConfigError
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.execution.cuda_graphs import forget_recordings
from megatron.core.transformer.execution.operations import describe_operations
from megatron.core.transformer.moe.router import TopKRouter
from megatron.training.flags.read import read_run_config
from tests.support.gpt_models import SEQUENCE_LENGTH, build_model, read_config, token_batch
from tests.support.graph_stand_in import StandInRecorder

STEPS = 4
SIZES = """--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
    --micro-batch-size 1 --global-batch-size 4 --train-iters 5 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer
    --vocab-size 63"""


def train(flags: str, recorder: Recorder | None, microbatches: int = 2) -> tuple[list[torch.Tensor], GPTModel]:
    """Some steps with plain updates: the losses of each microbatch and the gradients of each step."""
    model = build_model(flags)
    device = next(model.parameters()).device
    torch.manual_seed(5)
    chunk = DistributedDataParallel(model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    if recorder is not None:
        model.decoder.record_layers(recorder)
    found = []
    for step in range(STEPS):
        chunk.zero_grad_buffer()
        for scale in find_auxiliary_loss_scales([model]):
            scale.begin_step(torch.tensor(0.5) if step % 2 else 1 / 3)
        for microbatch in range(microbatches):
            ids, positions, labels = (x.to(device) for x in token_batch(seed=10 * step + microbatch))
            losses = chunk(ids, positions, labels=labels)
            losses.mean().backward()
            found.append(losses.detach().clone())
        chunk.finish_grad_sync()
        for router in (module for module in model.modules() if isinstance(module, TopKRouter)):
            load = router.take_load()
            found += [*router.take_losses().values(), *([] if load is None else [load])]
        for module in model.modules():
            if hasattr(type(module), "finish_step"):
                module.finish_step(chunk.groups)  # type: ignore[operator]
        for buffer in chunk.flat_buffers:
            found.append(buffer.grad_data.clone())
            for param, start in zip(buffer.params, buffer.starts, strict=True):
                grad = buffer.grad_data[start : start + param.numel()]
                param.data.view(-1).sub_(grad.to(param.dtype), alpha=0.1)
    return found, model


GRAPHS = "--cuda-graph-impl local --cuda-graph-warmup-steps 2"
LLAMA = """--disable-bias-linear --swiglu --normalization RMSNorm --position-embedding-type rope --hidden-size 72
    --num-attention-heads 6 --group-query-attention --num-query-groups 3"""
LATENT = """--multi-latent-attention --kv-lora-rank 12 --q-lora-rank 12 --qk-head-dim 8 --qk-pos-emb-head-dim 4
    --v-head-dim 6 --position-embedding-type rope"""
EXPERTS = "--num-experts 4 --moe-layer-freq 2 --moe-ffn-hidden-size 24 --disable-bias-linear"
LOSSES = """--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.1 0.1 --moe-z-loss-coeff 0.01
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-topk 2
    --moe-shared-expert-intermediate-size 24 --moe-per-layer-logging"""
FULL = "--recompute-granularity full --recompute-num-layers 1 --recompute-method"
SELECTIVE = "--recompute-granularity selective --recompute-modules"

# Flags, those about parts, and how many parts two layers have.
CASES = [
    ("--hidden-dropout 0.3 --attention-dropout 0.2", "", 2),
    (LLAMA, "", 2),
    (f"{LLAMA} --bf16 --fp32-residual-connection --window-size 4,0 --qk-layernorm", "--cuda-graph-modules attn mlp", 4),
    ("--no-gradient-accumulation-fusion --hidden-dropout 0.3", "--cuda-graph-modules attn", 2),
    ("--parallel-residual --norm-placement both", "--cuda-graph-scope mlp", 2),
    (LATENT, "--cuda-graph-scope full", 2),
    (EXPERTS, "--cuda-graph-modules attn mlp", 3),
    (f"{EXPERTS} {LOSSES}", "--cuda-graph-modules attn moe_router moe_preprocess", 3),
    (f"{EXPERTS} --moe-layer-freq 1 --moe-expert-capacity-factor 0.9 {LOSSES}", "--cuda-graph-modules moe_router", 2),
    (f"{FULL} uniform", "", 2),
    (f"{FULL} block --bf16", "", 2),
    (f"{SELECTIVE} core_attn layernorm mlp_act --swiglu", "", 2),
]


@pytest.mark.flags("--cuda-graph-impl", "--cuda-graph-modules", "--cuda-graph-scope", "--cuda-graph-warmup-steps")
@pytest.mark.parametrize(("flags", "which", "parts"), CASES)
def test_recorded_layers_train_as_others_do(flags: str, which: str, parts: int) -> None:
    plain, _ = train(flags, None)
    recorder = StandInRecorder()
    recorded, model = train(f"{flags} {which} {GRAPHS}", recorder)
    for one, other in zip(plain, recorded, strict=True):
        assert torch.equal(one, other)
    assert slots(model) == recorder.pools == recorder.sessions == 1
    # Two steps of two microbatches behind the warm-up, forward and backward.
    assert recorder.replays == 2 * 2 * 2 * parts


def slots(model: GPTModel) -> int:
    """Microbatches that have recordings."""
    assert model.decoder.passes is not None
    return model.decoder.passes.slots


def recorded_model(flags: str = "", steps: int = 2) -> tuple[GPTModel, StandInRecorder]:
    """A model behind its warm-up, with gradients in main_grad."""
    model, recorder = build_model(f"{flags} {GRAPHS}"), StandInRecorder()
    DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    model.decoder.record_layers(recorder)
    for _ in range(steps):
        run(model).backward()
        model.decoder.finish_step(None)  # type: ignore[arg-type]
    return model, recorder


def run(model: GPTModel, seed: int = 1, length: int = SEQUENCE_LENGTH) -> torch.Tensor:
    """The mean loss of a microbatch."""
    ids, positions, labels = token_batch(seed=seed, length=length)
    loss: torch.Tensor = model(ids, positions, labels=labels).mean()
    return loss


def test_microbatches_in_flight_have_recordings_of_their_own() -> None:
    """The order of a pipeline: two forwards before the first backward, and two backwards at the end."""

    def take_step(model: GPTModel) -> list[torch.Tensor]:
        for param in model.parameters():
            param.main_grad.zero_()  # type: ignore[attr-defined,operator]
        first, second = run(model, 1), run(model, 2)
        first.backward()
        third = run(model, 3)
        second.backward()
        third.backward()
        model.decoder.finish_step(None)  # type: ignore[arg-type]
        grads = [param.main_grad.clone() for param in model.parameters()]  # type: ignore[operator,attr-defined]
        return [first.detach(), second.detach(), third.detach(), *grads]

    model, recorder = recorded_model()
    plain, _ = recorded_model(steps=0)
    plain.decoder.passes = None
    expected = take_step(plain)
    # One was in flight at a time so far: of the three, the second found its place taken.
    for replays, slots_after in ((2 * 4, 2), (3 * 4, 2)):
        before = recorder.replays
        assert all(map(torch.equal, take_step(model), expected))
        assert (recorder.replays - before, slots(model)) == (replays, slots_after)


def test_a_microbatch_whose_loss_is_thrown_away_gives_its_recordings_back() -> None:
    model, recorder = recorded_model()
    for seed in range(4):
        run(model, seed)
    assert slots(model) == 1 and recorder.replays == 4 * 2
    run(model).backward()
    assert slots(model) == 1


def test_parts_pass_tensors_on_without_copies() -> None:
    model, _ = recorded_model("--cuda-graph-modules attn mlp --num-layers 3")
    handed_on: list[torch.Tensor] = []
    model.embedding.register_forward_hook(
        lambda module, inputs, output: output.register_hook(handed_on.append) and None
    )
    run(model).backward()
    calls = model.decoder.passes._slots[0].calls  # type: ignore[union-attr]
    assert len(calls) == 6
    for earlier, later in itertools.pairwise(calls):
        assert later.inputs[0].data_ptr() == earlier.outputs[0].data_ptr()
        assert earlier.output_grads[0].data_ptr() == later.input_grads[0].data_ptr()  # type: ignore[union-attr]
    assert all(grad is None for call in calls for grad in call.parameter_grads), "they are in main_grad"
    # What leaves the layers is not overwritten by the next micro-batch while it is being sent.
    assert handed_on[0].data_ptr() != calls[0].input_grads[0].data_ptr()  # type: ignore[union-attr]


def test_other_passes_run_without_recordings() -> None:
    model, recorder = recorded_model("--position-embedding-type rope")
    run(model).backward()
    replays = recorder.replays
    assert replays == 4
    with torch.no_grad():
        run(model)
    run(model, length=8).backward()
    model.eval()
    run(model).backward()
    model.train()
    handle = model.decoder.layers[0].mlp.linear_fc1.register_forward_hook(lambda *_: None)  # type: ignore[union-attr]
    run(model).backward()
    assert recorder.replays == replays
    handle.remove()
    run(model).backward()
    assert recorder.replays == 2 * replays and slots(model) == 1
    model, _ = recorded_model(f"{EXPERTS} --cuda-graph-modules moe_router")
    (part,) = model.decoder.passes._parts  # type: ignore[union-attr]
    assert not part.is_watched()
    (router,) = (module for module in model.modules() if isinstance(module, TopKRouter))
    router.route_log = object()  # type: ignore[assignment]
    assert part.is_watched(), "choices that are logged are made in every pass"


def test_masks_reach_the_recordings() -> None:
    model, recorder = recorded_model(steps=0)
    found = {}
    for step in range(4):
        ids, positions, labels = token_batch()
        mask = torch.ones(1, 1, SEQUENCE_LENGTH, SEQUENCE_LENGTH, dtype=torch.bool).triu(1)
        mask[..., :, : step % 2] = True
        mask[..., 0, 0] = False
        loss = model(ids, positions, mask, labels=labels).mean()
        loss.backward()
        model.decoder.finish_step(None)  # type: ignore[arg-type]
        found[step] = loss.detach()
    assert recorder.replays == 2 * 4
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3]) and not torch.equal(found[0], found[1])


def test_parameters_without_main_grad_get_gradients_of_their_own() -> None:
    found = []
    for recorder in (None, StandInRecorder()):
        model = build_model(f"{LLAMA} {GRAPHS}")
        if recorder is not None:
            model.decoder.record_layers(recorder)
        for seed in range(4):
            run(model, seed).backward()
            model.decoder.finish_step(None)  # type: ignore[arg-type]
        found.append([param.grad for param in model.parameters()])
    assert recorder is not None and recorder.replays == 2 * 4
    assert all(map(torch.equal, *found))


def test_recordings_can_be_freed() -> None:
    model, recorder = recorded_model()
    run(model).backward()
    replays = recorder.replays
    forget_recordings(model)
    for _ in range(5):
        run(model).backward()
        model.decoder.finish_step(None)  # type: ignore[arg-type]
    assert recorder.replays == replays and slots(model) == 0


def test_a_second_backward_is_refused() -> None:
    model, _ = recorded_model()
    loss = model.decoder(torch.ones(SEQUENCE_LENGTH, 2, 32, requires_grad=True)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


# ---- flags


@pytest.mark.flags("--enable-cuda-graph", "--external-cuda-graph", "--cuda-graph-scope", "--te-rng-tracker")
@pytest.mark.parametrize(
    ("flags", "impl", "modules", "notes"),
    [
        ("--enable-cuda-graph", "local", [], ["--enable-cuda-graph is an earlier name of --cuda-graph-impl local"]),
        (
            "--external-cuda-graph --cuda-graph-scope attn",
            "transformer_engine",
            ["attn"],
            ["--external-cuda-graph is an earlier", "--cuda-graph-scope attn is an earlier", "records layers as local"],
        ),
        ("--cuda-graph-impl local --te-rng-tracker", "local", [], ["--te-rng-tracker has no effect: graphs"]),
    ],
)
def test_earlier_names(flags: str, impl: str, modules: list[str], notes: list[str]) -> None:
    config = read_config(flags)
    assert (config.model.cuda_graph_impl, config.model.cuda_graph_modules) == (impl, modules)
    for note in notes:
        assert any(note in found for found in config.notes), config.notes


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--cuda-graph-impl local --fp8-format hybrid --cuda-graph-modules attn", "with --fp8-format hybrid, whose"),
        ("--enable-cuda-graph --fp4-format e2m1 --bf16 --cuda-graph-warmup-steps 5", "with --fp4-format e2m1, whose"),
        (
            "--external-cuda-graph --transformer-impl transformer_engine",
            "with --transformer-impl transformer_engine, whose",
        ),
        ("--cuda-graph-impl local --transformer-impl auto", "with --transformer-impl auto, whose"),
        ("--num-experts 4 --cuda-graph-impl local --fp8-format hybrid", "with --fp8-format hybrid, whose"),
    ],
)
def test_layers_whose_numbers_no_graph_repeats_are_launched_as_ever(flags: str, said: str) -> None:
    config = read_config(flags)
    assert config.model.cuda_graph_impl == "none" and not config.model.records("attn")
    (note,) = (note for note in config.notes if note.startswith("CUDA graphs have no effect"))
    assert said in note and not any("without --cuda-graph-impl" in found for found in config.notes)
    # A caller from Python hears that it cannot be.
    config.model.cuda_graph_impl = "local"
    assert any(said.removeprefix("with ") in problem for problem in [*config.model.problems(), *config.problems()])


ROUTER = "--num-experts 4 --cuda-graph-modules moe_router"
REFUSED = {
    "--num-experts 4": "--cuda-graph-modules attn",
    "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1": "--pipeline-schedule 1f1b or interleaved",
    "--cpu-offloading-num-layers 1": "--cpu-offloading-num-layers 1 cannot move",
    "--fine-grained-activation-offloading --offload-modules core_attn": "--offload-modules core_attn: ",
    "--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap": "cannot record --tp-comm-overlap",
    f"{FULL} uniform --cuda-graph-modules attn": "which --cuda-graph-modules attn divides",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2": "--recompute-num-layers 1",
    f"{FULL} block --hidden-dropout 0.1": "the same dropout again",
    f"{SELECTIVE} core_attn --attention-dropout 0.1": "the same dropout again",
    "--context-parallel-size 2": "--cuda-graph-modules mlp",
    "--tensor-model-parallel-size 2 --attention-dropout 0.1": "use --sequence-parallel or --attention-dropout 0",
    "--attention-dropout 0.1 --attn-logit-softcapping 30": "its seed for --attn-logit-softcapping 30",
    "--attention-dropout 0.1 --softmax-type off-by-one": "its seed for --softmax-type off-by-one",
    "--qk-clip": "leave out --qk-clip",
    "--use-torch-fsdp2": "--use-distributed-optimizer",
    "--log-comm-volume": "--log-comm-volume counts calls",
    "--dataloader-inter-document-masking": "microbatches of one shape",
    "--cuda-graph-impl full_iteration": "use none or local or transformer_engine",
    "--num-experts 4 --cuda-graph-modules moe": "use attn or mlp or moe_router",
    "--cuda-graph-modules moe_router": "needs --num-experts",
    "--cuda-graph-modules moe_preprocess": "name both",
    f"{ROUTER} --moe-input-jitter-eps 0.1": "--moe-input-jitter-eps 0.1 does",
    f"{ROUTER} --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.1": "global_aux_loss, in which",
    f"{ROUTER} {SELECTIVE} moe": "--recompute-modules moe",
    "--enable-cuda-graph --external-cuda-graph": "use --cuda-graph-impl",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_what_cannot_be_recorded_is_refused_with_a_remedy(flags: str) -> None:
    impl = "" if "cuda-graph-impl" in flags else "--cuda-graph-impl local"
    words = f"{impl} {flags} {SIZES}".split()
    with pytest.raises(ConfigError) as refused:
        read_run_config(words, {"WORLD_SIZE": "2"})
    assert any(REFUSED[flags] in sentence for sentence in refused.value.problems), refused.value.problems


def test_parts_that_lie_elsewhere_may_be_combined() -> None:
    offloaded = f"{EXPERTS} --fine-grained-activation-offloading --offload-modules expert_fc1 moe_act"
    assert read_config(f"{offloaded} --cuda-graph-impl local --cuda-graph-modules attn").model.records("attn")
    assert not read_config("--context-parallel-size 1 --cuda-graph-impl local --cuda-graph-modules mlp").model.records(
        "attn"
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("", "eager"),
        ("--cuda-graph-impl local", "eager; whole layers launched as CUDA graphs from step 4 on"),
        (f"{GRAPHS} --cuda-graph-modules attn mlp", "eager; attn and mlp launched as CUDA graphs from step 3 on"),
    ],
)
def test_the_log_says_so(flags: str, said: str) -> None:
    assert describe_operations(read_config(flags).model)["layers"] == said

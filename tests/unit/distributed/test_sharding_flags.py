# SPDX-License-Identifier: Apache-2.0
"""What the flags of fully sharded data parallelism become, and which of them contradict each other."""

from __future__ import annotations

import os

import pytest
from torch import nn

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.torch_fully_sharded_data_parallel import find_sharding_units
from megatron.core.errors import ConfigError
from megatron.training.config.container import RunConfig
from megatron.training.launch import initialize
from megatron.training.launch.initialize import Launch, _prepare_environment
from tests.support.run_flags import run_config

UPSTREAM = "--use-megatron-fsdp --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"


def has_note(config: RunConfig, *parts: str) -> bool:
    return any(all(part in note for part in parts) for note in config.notes)


@pytest.mark.flags("--use-megatron-fsdp", "--data-parallel-sharding-strategy")
@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
def test_a_script_of_upstream_gets_fsdp2(strategy: str) -> None:
    config = run_config(f"{UPSTREAM} --data-parallel-sharding-strategy {strategy}", world_size=2)
    ddp = config.ddp
    assert ddp.use_torch_fsdp2 and ddp.data_parallel_sharding_strategy == strategy
    assert not (ddp.use_distributed_optimizer or ddp.overlap_grad_reduce or ddp.overlap_param_gather)
    assert not config.model.gradient_accumulation_fusion
    assert has_note(config, "--use-megatron-fsdp becomes", "ZeRO-2" if strategy == "optim_grads" else "ZeRO-3")
    for flag in UPSTREAM.split()[1:]:
        assert has_note(config, f"{flag} has no effect with --use-megatron-fsdp, which does so always"), flag


@pytest.mark.flags("--use-megatron-fsdp", "--data-parallel-sharding-strategy")
def test_less_than_gradients_is_divided_without_fsdp2() -> None:
    optim = run_config(f"{UPSTREAM} --data-parallel-sharding-strategy optim", world_size=2)
    assert optim.ddp.use_distributed_optimizer and optim.ddp.overlap_param_gather and not optim.ddp.use_torch_fsdp2
    assert has_note(optim, "--use-megatron-fsdp becomes --use-distributed-optimizer")
    nothing = run_config(f"{UPSTREAM} --data-parallel-sharding-strategy no_shard", world_size=2)
    assert not (nothing.ddp.use_distributed_optimizer or nothing.ddp.overlap_param_gather)
    assert nothing.ddp.overlap_grad_reduce
    assert has_note(nothing, "--use-megatron-fsdp becomes plain data parallelism")
    assert has_note(nothing, "--overlap-param-gather has no effect: nothing is divided")


@pytest.mark.flags("--use-megatron-fsdp", "--ckpt-format")
def test_checkpoints_are_those_of_every_layout() -> None:
    config = run_config("--use-megatron-fsdp --ckpt-format fsdp_dtensor", world_size=2)
    assert config.checkpoint.ckpt_format == "torch_dist"
    assert has_note(config, "--ckpt-format fsdp_dtensor is not written", "saved as torch_dist")
    with pytest.raises(ConfigError, match="--ckpt-format fsdp_dtensor needs --use-megatron-fsdp; use torch_dist"):
        run_config("--use-torch-fsdp2 --ckpt-format fsdp_dtensor", world_size=2)


def test_collectives_get_queues_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor parallelism wants one hardware queue for all, FSDP2 several."""
    for flags, expected in (("--use-distributed-optimizer", "1"), ("--use-megatron-fsdp", None)):
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
        monkeypatch.setenv("LOCAL_RANK", "0")
        config = run_config(f"--tensor-model-parallel-size 2 {flags}", world_size=4)
        _prepare_environment(config, Launch(rank=0, local_rank=0, world_size=4))
        assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == expected, flags


def test_linked_gpus_get_several_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where tensor-parallel layers may communicate inside of products: with sequence parallelism, on one machine."""
    monkeypatch.setattr(initialize, "gpus_have_links", lambda: True)
    sp = "--tensor-model-parallel-size 2 --sequence-parallel"
    for flags, local, expected in (
        (sp, "4", "32"), (sp.split(" --s")[0], "4", "1"), (sp, "1", "1"), (f"{sp} --deterministic-mode", "4", "1"),
        (f"{sp} --context-parallel-size 2", "4", "1"),
    ):  # fmt: skip
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
        monkeypatch.setenv("LOCAL_RANK", "0")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        _prepare_environment(run_config(flags, world_size=4), Launch(rank=0, local_rank=0, world_size=4))
        assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == expected, flags
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    _prepare_environment(run_config(sp, world_size=4), Launch(rank=0, local_rank=0, world_size=4))
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "8", "a user's stays"


@pytest.mark.flags("--use-megatron-fsdp")
def test_one_process_has_nothing_to_divide() -> None:
    config = run_config(f"{UPSTREAM} --bf16 --megatron-fsdp-grad-comm-dtype bf16")
    assert has_note(config, "--use-megatron-fsdp has no effect: one process")
    assert not config.ddp.grad_reduce_in_fp32


@pytest.mark.flags("--megatron-fsdp-main-grads-dtype", "--megatron-fsdp-grad-comm-dtype")
@pytest.mark.parametrize("flag", ["--megatron-fsdp-main-grads-dtype", "--megatron-fsdp-grad-comm-dtype"])
def test_gradients_that_are_not_divided(flag: str) -> None:
    optim = "--use-megatron-fsdp --data-parallel-sharding-strategy optim"
    assert run_config(f"{optim} --bf16", world_size=2).ddp.grad_reduce_in_fp32
    assert not run_config(f"{optim} --bf16 {flag} bf16", world_size=2).ddp.grad_reduce_in_fp32
    assert not run_config(f"{optim} --fp16", world_size=2).ddp.grad_reduce_in_fp32
    assert run_config(f"{optim} --fp16 {flag} fp32", world_size=2).ddp.grad_reduce_in_fp32


@pytest.mark.flags(
    "--fsdp-double-buffer", "--megatron-fsdp-max-pool-double-buffer", "--fsdp-db-use-persist-buf-on-alloc-fail",
    "--fsdp-manual-registration", "--disable-symmetric-registration", "--megatron-fsdp-version",
)  # fmt: skip
@pytest.mark.parametrize(
    ("hint", "instead"),
    [
        ("--fsdp-double-buffer", "PyTorch's allocator hands out"),
        ("--megatron-fsdp-max-pool-double-buffer", "there are no fixed buffers"),
        ("--fsdp-db-use-persist-buf-on-alloc-fail", "there are no fixed buffers"),
        ("--fsdp-manual-registration", "NCCL is told of memory"),
        ("--disable-symmetric-registration", "without symmetric windows anyway"),
        ("--megatron-fsdp-version 2", "PyTorch's FSDP2 takes the place of either"),
    ],
)
def test_hints_say_what_happens_instead(hint: str, instead: str) -> None:
    assert has_note(run_config(f"--use-megatron-fsdp {hint}", world_size=2), f"{hint} has no effect", instead)


@pytest.mark.parametrize(
    "flag",
    [
        "--suggested-communication-unit-size 10",
        "--megatron-fsdp-enable-fine-grained-param-gather",
        "--megatron-fsdp-main-params-dtype auto",
        "--megatron-fsdp-main-grads-dtype fp32",
        "--megatron-fsdp-grad-comm-dtype fp32",
    ],
)
def test_flags_of_divided_parameters_are_noted_without_them(flag: str) -> None:
    config = run_config(flag, world_size=2)
    assert has_note(config, f"{flag} has no effect without --use-torch-fsdp2 or --use-megatron-fsdp")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--use-torch-fsdp2", "--use-megatron-fsdp and --use-torch-fsdp2 contradict"),
        ("--pipeline-model-parallel-size 2 --num-layers 4 --pipeline-schedule zb-v", "use --pipeline-schedule 1f1b"),
        ("--optimizer muon", "which --use-megatron-fsdp divides"),
        ("--num-distributed-optimizer-instances 4", "leaves each of the 4 model copies whole"),
        ("--num-distributed-optimizer-instances 3", "does not divide the 4 model copies"),
        ("--outer-dp-sharding-strategy optim", "equal copies; use no_shard"),
        ("--enable-full-sharding-in-hsdp", "use --num-distributed-optimizer-instances 1"),
        (
            "--suggested-communication-unit-size 9 --megatron-fsdp-enable-fine-grained-param-gather",
            "each for itself; keep one",
        ),
        ("--use-nccl-ub --log-comm-volume", "cannot be combined with --log-comm-volume"),
        ("--use-nccl-ub --data-parallel-sharding-strategy optim", "works where parameters are divided"),
        ("--megatron-fsdp-grad-comm-dtype bf16", "neither float32 nor the model's fp32; use fp32, auto, or --bf16"),
        ("--bf16 --megatron-fsdp-main-params-dtype fp16", "neither float32 nor the model's bf16"),
        (
            "--bf16 --megatron-fsdp-main-params-dtype auto --megatron-fsdp-main-grads-dtype fp32",
            "use --megatron-fsdp-main-grads-dtype auto",
        ),
        ("--bf16 --grad-reduce-in-bf16 --megatron-fsdp-grad-comm-dtype fp32", "contradicts --grad-reduce-in-bf16"),
        (
            "--bf16 --accumulate-allreduce-grads-in-fp32 --megatron-fsdp-main-grads-dtype bf16",
            "contradicts --accumulate-allreduce-grads-in-fp32",
        ),
        (
            "--bf16 --data-parallel-sharding-strategy optim --megatron-fsdp-main-params-dtype bf16",
            "needs divided parameters",
        ),
        (
            "--bf16 --data-parallel-sharding-strategy optim --megatron-fsdp-main-grads-dtype fp32 "
            "--megatron-fsdp-grad-comm-dtype bf16",
            "use one format for both",
        ),
    ],
)
def test_refusals(flags: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        run_config(f"--use-megatron-fsdp {flags}", world_size=4)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2)  # 4 parameters
        self.attention = nn.Sequential(nn.Linear(2, 2))  # 6


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 2)
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList(Layer() for _ in range(5))


def units(network: nn.Module, **settings: object) -> list[list[str]]:
    names = {part: name for name, part in network.named_modules()}
    config = DistributedDataParallelConfig(**settings)  # type: ignore[arg-type]
    return [
        [names[part].removeprefix("decoder.layers.") for part in unit] for unit in find_sharding_units(network, config)
    ]


@pytest.mark.flags("--suggested-communication-unit-size", "--megatron-fsdp-enable-fine-grained-param-gather")
def test_what_is_gathered_together() -> None:
    network = Network()
    assert units(network) == [["0"], ["1"], ["2"], ["3"], ["4"], ["embedding"]]
    asked = run_config("--use-megatron-fsdp --suggested-communication-unit-size 11", world_size=2).ddp
    size = asked.suggested_communication_unit_size
    assert units(network, suggested_communication_unit_size=size) == [["0", "1"], ["2", "3"], ["4"], ["embedding"]]
    asked = run_config("--use-megatron-fsdp --megatron-fsdp-enable-fine-grained-param-gather", world_size=2).ddp
    fine = units(network, megatron_fsdp_enable_fine_grained_param_gather=(
        asked.megatron_fsdp_enable_fine_grained_param_gather
    ))  # fmt: skip
    assert fine == [[f"{n}.attention"] for n in range(5)] + units(network)
    network.share_embeddings_and_output_weights = True  # type: ignore[assignment]
    assert units(network) == [["0"], ["1"], ["2"], ["3"], ["4"]]


@pytest.mark.parametrize(
    "later",
    [
        "--pipeline-schedule zb-h1",
        "--defer-embedding-wgrad-compute",
        "--num-experts 2 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --disable-bias-linear "
        "--overlap-moe-expert-parallel-comm --delay-wgrad-compute",
    ],
)
def test_later_weight_gradients_are_refused_by_what_was_written(later: str) -> None:
    """FSDP2 itself switches the fusion of gradients off, of which the user need not know."""
    flags = f"--num-layers 4 --pipeline-model-parallel-size 2 --use-torch-fsdp2 {later}"
    with pytest.raises(ConfigError) as error:
        run_config(flags, world_size=4)
    assert "--use-torch-fsdp2" in str(error.value) and "accumulation-fusion" not in str(error.value)

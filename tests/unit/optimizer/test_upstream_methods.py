# SPDX-License-Identifier: Apache-2.0
"""What programs written for upstream call on the optimizer and on DistributedDataParallel."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core import dist_checkpointing
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.errors import CheckpointError, ConfigError
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import (
    ChainedOptimizer,
    DistributedOptimizer,
    OptimizerConfig,
    ParamKey,
    get_megatron_optimizer,
)
from megatron.core.transformer.transformer_config import TransformerConfig

TOKENS = torch.arange(12).view(2, 6)


def build(
    *, divided: bool = False, overrides: Any = None, optimizer: Any = None, engine: bool = False, **changes: Any
) -> tuple[Any, Any]:
    shape: dict[str, Any] = {"num_layers": 2, "hidden_size": 24, "num_attention_heads": 6, "hidden_dropout": 0.0,
                             "attention_dropout": 0.0, "num_moe_experts": 2, "moe_layer_freq": [0, 1]}  # fmt: skip
    config = TransformerConfig(**shape | changes)
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=divided, grad_reduce_in_fp32=True, check_for_nan_in_grad=False
    )
    model = GPTModel(config, get_gpt_decoder_block_spec(config, engine), 29, 8, position_embedding_type="rope")
    chunk = DistributedDataParallel(config=config, module=model, disable_bucketing=False, ddp_config=ddp)
    settings = {"lr": 0.01, "bf16": config.bf16, "fp16": config.fp16, "use_distributed_optimizer": divided}
    settings |= {"params_dtype": torch.float32, "overlap_param_gather": False}
    made = get_megatron_optimizer(
        config=OptimizerConfig(**settings | (optimizer or {})), model_chunks=[chunk], config_overrides=overrides,
        use_gloo_process_groups=False,
    )  # fmt: skip
    return chunk, made


def backward(chunk: Any, optimizer: Any) -> None:
    chunk.zero_grad_buffer()
    optimizer.zero_grad(set_to_none=True)
    loss = chunk(TOKENS, None, None, labels=TOKENS).sum()
    (loss * optimizer.get_loss_scale().item()).backward()
    chunk.finish_grad_sync()


def weights(chunk: Any) -> list[torch.Tensor]:
    return [param.detach().clone() for param in chunk.parameters()]


@pytest.mark.parametrize("changes", [{}, {"bf16": True, "divided": True}], ids=["fp32", "bf16"])
def test_a_chain_of_one_with_the_state_of_a_torch_optimizer(changes: dict[str, Any]) -> None:
    chunk, optimizer = build(**changes)
    assert isinstance(optimizer, ChainedOptimizer) and optimizer.chained_optimizers == [optimizer]
    assert isinstance(optimizer, DistributedOptimizer) == changes.get("divided", False)
    assert not optimizer.is_stub_optimizer and optimizer.get_loss_scale().tolist() == [1.0]
    backward(chunk, optimizer)
    succeeded, norm, _ = optimizer.step()
    assert succeeded and float(norm) > 0
    inner = optimizer.optimizer
    mains = [main for group in inner.param_groups for main in group["params"]]
    assert (
        {id(main) for main in mains}
        == {id(main) for main in inner.state}
        == {id(m) for m in optimizer.get_parameters()}
    )
    assert sum(main.numel() for main in mains) == sum(param.numel() for param in chunk.parameters())
    copies = [main for group in optimizer.shard_fp32_from_float16_groups for main in group]
    assert bool(copies) == ("bf16" in changes) and all(main.dtype == torch.float32 for main in mains)
    kinds = {kind: tensor.clone() for kind, tensor in inner.state[mains[0]].items()}
    assert set(kinds) == {"exp_avg", "exp_avg_sq", "step"} and kinds["step"] == 1
    assert kinds["exp_avg"].shape == mains[0].shape and kinds["exp_avg"].abs().max() > 0
    # Moved to the host and back, as to other memory, and written through.
    for main in copies:
        main.data = main.data.clone()
    for state in inner.state.values():
        state["exp_avg"] = state["exp_avg"].clone()
        state["exp_avg_sq"].zero_()
        state["step"].zero_()
    slices = optimizer.named_slices().values()
    assert optimizer.step_count == 0 and all(found.tensors["exp_avg_sq"].abs().max() == 0 for found in slices)
    before = weights(chunk)
    for main in mains:
        main.data.add_(1.0)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    backward(chunk, optimizer)
    optimizer.step()
    assert all(((new - old - 1).abs() < 0.02).all() for new, old in zip(weights(chunk), before, strict=True))
    optimizer.offload_to_cpu()
    optimizer.restore_from_cpu()
    assert optimizer.count_zeros() >= 0


def test_gradients_are_looked_at_once() -> None:
    chunk, optimizer = build(fp16=True, optimizer={"initial_loss_scale": 8.0, "hysteresis": 1})
    backward(chunk, optimizer)
    assert optimizer.prepare_grads() is False
    norm = optimizer.get_grad_norm()
    assert optimizer.step_with_ready_grads() and optimizer.step_count == 1
    backward(chunk, optimizer)
    next(chunk.parameters()).main_grad.fill_(float("inf"))
    before = weights(chunk)
    assert optimizer.prepare_grads() is True and optimizer.get_loss_scale().tolist() == [4.0]
    assert optimizer.step()[0] is False and optimizer.get_loss_scale().tolist() == [4.0]
    assert all(map(torch.equal, weights(chunk), before)) and torch.isfinite(norm)


def test_other_rates_for_chosen_parameters() -> None:
    overrides = {
        ParamKey(name="*.linear_qkv.weight"): {"max_lr": 0.5, "min_lr": 0.1},
        ParamKey(attr="is_special"): {"wd_mult": 3.0},
    }
    _, optimizer = build(overrides=overrides)
    chosen = [group for group in optimizer.param_groups if group.get("max_lr") == 0.5]
    assert [group["lr"] for group in chosen] == [0.5] and chosen[0]["min_lr"] == 0.1
    assert all(len(group["params"]) == 2 for group in chosen)
    # Names that a spec shows, for one of several experts the stack in which they are stored.
    for name, count in (("*.linear_fc1.layer_norm_weight", 1), ("*.experts.linear_fc2.weight1", 1), ("*", None)):
        _, optimizer = build(overrides={ParamKey(name=name): {"max_lr": 0.5}}, engine=True)
        chosen = [param for group in optimizer.param_groups if group.get("max_lr") == 0.5 for param in group["params"]]
        assert len(chosen) == count or count is None and all("max_lr" in group for group in optimizer.param_groups)
    with pytest.raises(ConfigError, match="config_overrides has 'speed'"):
        build(overrides={ParamKey(name="*"): {"speed": 1.0}})
    with pytest.raises(ConfigError, match="use_distributed_optimizer=True.*give both the same"):
        build(optimizer={"use_distributed_optimizer": True})


@pytest.mark.parametrize("way", ["sharded", "plain", "file"])
def test_all_state_is_saved_and_loaded(way: str, tmp_path: Path) -> None:
    chunk, optimizer = build(bf16=True)
    for _ in range(2):
        backward(chunk, optimizer)
        optimizer.step()
    other_chunk, other = build(bf16=True)
    other_chunk.load_state_dict(chunk.state_dict())
    if way == "sharded":
        model = chunk.sharded_state_dict()
        saved = {"model": model, "optimizer": optimizer.sharded_state_dict(model, is_loading=False)}
        dist_checkpointing.save(saved, tmp_path / "saved")
        wanted = {"optimizer": other.sharded_state_dict(other_chunk.sharded_state_dict(), is_loading=True)}
        other.load_state_dict(dist_checkpointing.load(wanted, tmp_path / "saved")["optimizer"])
    elif way == "plain":
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        optimizer.save_parameter_state(str(tmp_path / "state.pt"))
        other.load_parameter_state(str(tmp_path / "state.pt"))
        other.step_count = optimizer.step_count
    for name, found in optimizer.named_slices().items():
        for kind, tensor in found.tensors.items():
            assert torch.equal(other.named_slices()[name].tensors[kind], tensor), (name, kind)
    for pair in ((chunk, optimizer), (other_chunk, other)):
        backward(*pair)
        pair[1].step()
    assert all(map(torch.equal, weights(chunk), weights(other_chunk)))
    with pytest.raises(CheckpointError, match="has no state"):
        other.load_state_dict({**optimizer.numbers(), "state": {}})


def test_memory_of_parameters_and_gradients_can_be_freed() -> None:
    chunk, optimizer = build()
    backward(chunk, optimizer)
    kept = weights(chunk)
    buffers = [*chunk.buffers, *chunk.expert_parallel_buffers]
    assert len(chunk.buffers) == len(chunk.expert_parallel_buffers) == 1 and list(chunk.buffers()) == []
    for buffer in buffers:
        buffer.param_data.cpu_data, size = buffer.param_data.data.cpu().clone(), buffer.param_data.storage().size()
        buffer.param_data.storage().resize_(0)
        buffer.param_data.storage().resize_(size)
        buffer.param_data.copy_(buffer.param_data.cpu_data)
    assert all(map(torch.equal, weights(chunk), kept))
    chunk.offload_grad_buffers()
    assert all(buffer.grad_data.untyped_storage().size() == 0 for buffer in buffers)
    chunk.restore_grad_buffers()
    chunk.free_overlap_buffers()
    backward(chunk, optimizer)
    assert all(param.main_grad.abs().max() > 0 for param in chunk.parameters() if param.dim() > 1)
    assert chunk.bucket_groups and chunk.expert_parallel_bucket_groups
    assert set(chunk.state_dict_for_save_checkpoint()) == set(chunk.state_dict())
    chunk.disable_forward_pre_hook()
    chunk.start_param_sync(chunk.module, force_sync=True)
    chunk.enable_forward_pre_hook()
    with chunk.no_sync():
        chunk(TOKENS, None, None, labels=TOKENS).sum().backward()
    with pytest.raises(ConfigError, match="full_param_layout"):
        DistributedDataParallel(chunk.config, chunk.ddp_config, chunk.module, full_param_layout=object())

# SPDX-License-Identifier: Apache-2.0
"""The sequence of slime's actor: flags of three programs on one command line, its own set-up, log-probabilities of
packed samples, a step that is pretrain_gpt.py's, checkpoints in upstream's format and a release, and weights out."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.distributed import finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.num_microbatches_calculator import (
    get_num_microbatches,
    init_num_microbatches_calculator,
    unset_num_microbatches_calculator,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.stacked_parameters import list_parameters
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.parameters import find_global_name
from megatron.core.utils import unwrap_model
from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args
from megatron.training.checkpointing import load_checkpoint, save_checkpoint
from megatron.training.flags.read import read_run_config
from megatron.training.global_vars import _build_tokenizer, set_args, unset_global_variables
from megatron.training.recipes.gpt import build_gpt_recipe
from megatron.training.step import train_step
from megatron.training.training import get_model
from megatron.training.verify.parity import open_local_run
from tests.parallel.harness import run_distributed
from tests.parallel.test_program_replays import LAYERS, LOCAL_EXPERTS, VOCABULARY, export, load, make_theirs, rename

LENGTH, MICRO_BATCH, MICROBATCHES = 8, 2, 2
LAYOUTS = {"tp2": (2, 1, 1), "pp2": (1, 2, 1), "dp2": (1, 1, 1), "ep2": (1, 1, 2)}
MODEL = f"""
    --num-layers {LAYERS} --hidden-size 32 --num-attention-heads 8 --group-query-attention --num-query-groups 4
    --ffn-hidden-size 40 --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear
    --position-embedding-type rope --untie-embeddings-and-output-weights --seq-length {LENGTH}
    --max-position-embeddings {LENGTH} --micro-batch-size {MICRO_BATCH} --hidden-dropout 0 --attention-dropout 0
    --tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --make-vocab-size-divisible-by 32
    --lr 1e-3 --adam-eps 1e-5 --clip-grad 1.0 --weight-decay 0.1 --train-iters 4
"""


def list_words(tp: int, pp: int, ep: int) -> list[str]:
    replicas = dist.get_world_size() // (tp * pp)
    words = MODEL + f" --global-batch-size {MICRO_BATCH * MICROBATCHES * replicas} --tensor-model-parallel-size {tp}"
    words += f" --pipeline-model-parallel-size {pp} --expert-model-parallel-size {ep} --use-distributed-optimizer"
    if tp > 1:
        words += " --sequence-parallel"
    if ep > 1:
        words += f" --num-experts {LOCAL_EXPERTS * ep} --moe-router-topk 2 --moe-ffn-hidden-size 40 --moe-grouped-gemm"
        words += " --moe-router-load-balancing-type none --moe-token-dispatcher-type alltoall"
    return words.split()


def add_own_flags(parser: Any) -> Any:
    parser.add_argument("--rollout-batch-size", type=int, required=True)
    with contextlib.suppress(Exception):  # where Megatron has the flag itself
        parser.add_argument("--padded-vocab-size", type=int, default=None)
    return parser


def read_arguments(tp: int, pp: int, ep: int) -> Namespace:
    engine = ["--sglang-mem-fraction-static", "0.7", "--rollout-batch-size", "8"]
    sys.argv = ["train.py", *list_words(tp, pp, ep), *engine]
    args = parse_args(add_own_flags, ignore_unknown_args=True)
    assert args.rollout_batch_size == 8 and not hasattr(args, "sglang_mem_fraction_static")
    args.rank, args.world_size = dist.get_rank(), dist.get_world_size()
    args.variable_seq_lengths = True
    validate_args(args)
    set_args(args)
    return args


def join(args: Namespace) -> None:
    mpu.initialize_model_parallel(
        args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size,
        pipeline_model_parallel_comm_backend=args.pipeline_model_parallel_comm_backend,
        use_sharp=args.use_sharp, context_parallel_size=args.context_parallel_size,
        hierarchical_context_parallel_sizes=args.hierarchical_context_parallel_sizes,
        expert_model_parallel_size=args.expert_model_parallel_size,
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
        nccl_communicator_config_path=args.nccl_communicator_config_path, order="tp-cp-ep-dp-pp",
        create_gloo_process_groups=args.enable_gloo_process_groups,
    )  # fmt: skip
    tensor_parallel.model_parallel_cuda_manual_seed(
        args.seed, te_rng_tracker=args.te_rng_tracker, inference_rng_tracker=args.inference_rng_tracker,
        use_cudagraphable_rng=False,
    )  # fmt: skip
    assert _build_tokenizer(args).vocab_size == VOCABULARY and args.padded_vocab_size == VOCABULARY
    init_num_microbatches_calculator(
        args.rank, args.rampup_batch_size, args.global_batch_size, args.micro_batch_size,
        mpu.get_data_parallel_world_size(), args.decrease_batch_size_if_needed,
    )  # fmt: skip
    assert get_num_microbatches() == MICROBATCHES
    assert mpu.get_virtual_pipeline_model_parallel_world_size() is None


def build(args: Namespace) -> tuple[list[Any], Any, Any]:
    def provide(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> GPTModel:
        config = core_transformer_config_from_args(args)
        return GPTModel(
            config=config, transformer_layer_spec=get_gpt_decoder_block_spec(config, use_transformer_engine=True),
            vocab_size=args.padded_vocab_size, max_sequence_length=args.max_position_embeddings,
            pre_process=pre_process, post_process=post_process, fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
            parallel_output=True, share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type, rotary_percent=args.rotary_percent,
            rotary_base=args.rotary_base, rope_scaling=args.use_rope_scaling, vp_stage=vp_stage,
        )  # fmt: skip

    model = get_model(provide, ModelType.encoder_or_decoder)
    names = [field.name for field in dataclasses.fields(OptimizerConfig) if hasattr(args, field.name)]
    config = OptimizerConfig(**{name: getattr(args, name) for name in names})
    config.timers = None
    optimizer = get_megatron_optimizer(
        config=config, model_chunks=model, use_gloo_process_groups=args.enable_gloo_process_groups
    )
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=args.lr_warmup_init, max_lr=args.lr, min_lr=args.min_lr or 0.0, lr_warmup_steps=0,
        lr_decay_steps=100, lr_decay_style=args.lr_decay_style, start_wd=args.start_weight_decay,
        end_wd=args.end_weight_decay, wd_incr_steps=100, wd_incr_style=args.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=args.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=args.override_opt_param_scheduler, wsd_decay_steps=None,
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )  # fmt: skip
    assert scheduler.num_steps == 0
    return model, optimizer, scheduler


def list_samples(replica: int) -> list[Tensor]:
    """Microbatches of a replica, [samples, length]."""
    shape = (MICROBATCHES, MICRO_BATCH, LENGTH)
    numbers = torch.arange(MICROBATCHES * MICRO_BATCH * LENGTH).view(shape)
    return list((numbers * (7 + 6 * replica) + 3 * replica) % (VOCABULARY - 1))


def follow(tokens: Tensor) -> Tensor:
    return tokens.roll(-1, dims=-1)


def forward_step(batches: Iterator[Tensor], model: Any, return_schedule_plan: bool = False) -> Any:
    assert not return_schedule_plan
    samples = next(batches)
    bounds = torch.arange(0, samples.numel() + 1, LENGTH, dtype=torch.int32)
    packed = PackedSeqParams(
        cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=LENGTH, max_seqlen_kv=LENGTH, qkv_format="thd"
    )
    output = model(
        input_ids=samples.view(1, -1), position_ids=None, attention_mask=None, labels=None, packed_seq_params=packed
    )

    def score(logits: Tensor, non_loss_data: bool = False) -> Any:
        assert logits.dtype == torch.float32
        losses = vocab_parallel_cross_entropy(logits.transpose(0, 1), follow(samples).view(-1, 1))[:, 0]
        log_probs = -losses
        if non_loss_data:
            return {"log_probs": log_probs.detach()}
        count = torch.tensor(losses.numel(), dtype=torch.int)
        kept = {"keys": ["loss"], "values": torch.stack([count.float(), losses.detach().sum()])}
        return losses.sum(), count, kept

    return output, score


def keep(model: list[Any]) -> dict[str, Tensor]:
    return {
        find_global_name(chunk, name): param.detach().clone()
        for chunk in map(unwrap_model, model)
        for name, param in list_parameters(chunk)
    }


def step_of_pretrain(words: list[str], weights: dict[str, Tensor], samples: list[Tensor]) -> Any:
    """Loss and updated weights of pretrain_gpt.py's step, with these weights and samples."""
    config = read_run_config([*words, "--mock-data"], {"WORLD_SIZE": str(dist.get_world_size())})
    with open_local_run(config, build_gpt_recipe(config), dist.get_rank()) as run:
        with torch.no_grad():
            for chunk in map(unwrap_model, run.model):
                for name, param in list_parameters(chunk):
                    param.copy_(weights[find_global_name(chunk, name)])
        run.optimizer.reload_model_params()
        positions = torch.arange(LENGTH).expand(MICRO_BATCH, LENGTH)
        batches = [
            {"tokens": one, "labels": follow(one), "loss_mask": torch.ones(one.shape), "position_ids": positions}
            for one in samples
        ]
        result = train_step(run, iter(batches))
        return {name: float(value) for name, value in result.losses.items()}, keep(run.model)


def replay(tp: int, pp: int, ep: int, directory: Path) -> Any:
    args = read_arguments(tp, pp, ep)
    join(args)
    model, optimizer, scheduler = build(args)
    theirs = rename(make_theirs(LOCAL_EXPERTS * ep if ep > 1 else 0).state_dict())
    load(model[0], theirs)
    optimizer.reload_model_params()
    before, samples = keep(model), list_samples(mpu.get_data_parallel_rank())
    run = get_forward_backward_func()
    options: dict[str, Any] = {
        "forward_step_func": forward_step, "model": model, "num_microbatches": MICROBATCHES, "seq_length": LENGTH,
        "micro_batch_size": MICRO_BATCH, "decoder_seq_length": args.decoder_seq_length,
    }  # fmt: skip
    for chunk in model:
        chunk.eval()
    with torch.no_grad():
        scores = run(data_iterator=[iter(samples)], forward_only=True, collect_non_loss_data=True, **options)
    for chunk in model:
        chunk.train()
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    config = model[0].config
    config.grad_scale_func, config.finalize_model_grads_func = optimizer.scale_loss, finalize_model_grads
    config.no_sync_func = [chunk.no_sync for chunk in model][0]
    told = run(data_iterator=[iter(samples)], forward_only=False, **options)
    assert not optimizer.prepare_grads()
    # `step` goes on with what is prepared.
    succeeded, norm, _ = optimizer.step()
    scheduler.step(increment=args.global_batch_size)
    assert succeeded and norm > 0 and scheduler.get_lr(optimizer.param_groups[0]) == pytest.approx(args.lr, rel=0.1)
    assert scheduler.num_steps == args.global_batch_size
    after, exported = keep(model), export(model[0])
    check_checkpoints(args, model, optimizer, scheduler, directory)
    mpu.destroy_model_parallel()
    unset_num_microbatches_calculator()
    unset_global_variables()
    loss, expected = step_of_pretrain(list_words(tp, pp, ep), before, samples)
    if told:
        sums = sum(entry["values"] for entry in told)
        dist.all_reduce(sums) if dist.get_world_size() > tp * pp else None
        assert float(sums[1] / sums[0]) == pytest.approx(loss["lm loss"], rel=1e-6)
    for name, value in expected.items():
        torch.testing.assert_close(after[name], value, rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
        assert not torch.equal(after[name], before[name]), name
    return [entry["log_probs"] for entry in scores], exported


def check_checkpoints(args: Namespace, model: list[Any], optimizer: Any, scheduler: Any, directory: Path) -> None:
    """Save what convert_torch_dist_to_hf.py reads, spoil the model, load; then as a release, for which slime's
    converter writes the tracker."""
    args.save = args.load = str(directory)
    args.ckpt_format = "upstream_torch_dist"
    expected = keep(model)
    save_checkpoint(
        3, model, optimizer, scheduler, num_floating_point_operations_so_far=7, checkpointing_context={},
        train_data_iterator=None, preprocess_common_state_dict_fn=None,
    )  # fmt: skip
    for iteration in (3, 0):
        with torch.no_grad():
            for param in model[0].parameters():
                param.zero_()
        options: dict[str, Any] = {"checkpointing_context": {}, "skip_load_to_model_and_opt": False}
        parts = (optimizer, scheduler) if iteration else (None, None)
        assert load_checkpoint(model, *parts, **options) == (iteration, 7 if iteration else 0)
        assert all(torch.equal(value, expected[name]) for name, value in keep(model).items())
        dist.barrier()
        if iteration and dist.get_rank() == 0:
            common = torch.load(directory / "iter_0000003/common.pt", weights_only=False)
            assert common["args"].num_layers == LAYERS and common["iteration"] == 3
            os.rename(directory / "iter_0000003", directory / "release")
            (directory / "latest_checkpointed_iteration.txt").write_text("release")
        dist.barrier()


def replay_all(directory: Path) -> dict[str, Any]:
    if dist.get_world_size() == 1:
        return {"alone": replay(1, 1, 1, directory / "alone")}
    return {name: replay(*sizes, directory / name) for name, sizes in LAYOUTS.items()}


@pytest.mark.filterwarnings("ignore:layers are those of the local spec")
def test_slime(tmp_path: Path) -> None:
    together = run_distributed(replay_all, 2, tmp_path)
    for name, (tp, pp, ep) in {"alone": (1, 1, 1), **LAYOUTS}.items():
        found = [run_distributed(replay_all, 1, tmp_path)[0]] if name == "alone" else together
        theirs = make_theirs(LOCAL_EXPERTS * ep if ep > 1 else 0)
        for rank, results in enumerate(found):
            scores, exported = results[name]
            assert set(exported) == set(rename(theirs.state_dict()))
            replica = rank if tp == pp == 1 else 0
            for ours, samples in zip(scores, list_samples(replica), strict=pp == 1 or rank == 1):
                log_probs = theirs(samples).logits.log_softmax(-1).gather(2, follow(samples)[..., None]).flatten()
                torch.testing.assert_close(ours, log_probs.detach(), rtol=0, atol=1e-5)

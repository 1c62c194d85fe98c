# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning on the library: the same processes write texts, judge them by a rule, and learn from them.

    python examples/programs/reinforce.py
    torchrun --nproc-per-node 2 examples/programs/reinforce.py
    torchrun --nproc-per-node 2 examples/programs/reinforce.py --tensor-model-parallel-size 2

A text gets the share of its tokens that are larger than the token before as its reward. A tiny random GPT begins at
about a half, as chance has it; after 40 steps, in less than a minute on a CPU, it is above 0.9. The form is that of
slime's and verl's trainers: groups of samples per prompt, log-probabilities by a forward-only pass, packed sequences, a
clipped loss (Schulman et al., 2017, equation 7) with advantages inside each group (Shao et al., 2024, section 4.1.2).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.core import parallel_state as mpu  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.distributed.finalize_model_grads import finalize_model_grads  # noqa: E402
from megatron.core.inference.generate import generate  # noqa: E402
from megatron.core.inference.sampling import Sampling  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.post_training.log_probs import compute_log_probs  # noqa: E402
from megatron.core.post_training.policy_loss import PolicyLoss, PolicyTokens  # noqa: E402
from megatron.core.post_training.segments import Answers, find_answers  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

VOCABULARY, PROMPT, ANSWER = 32, 2, 8
PROMPTS, SAMPLES, MICROBATCHES = 8, 8, 4
LOSS = PolicyLoss(clip_low=0.2, clip_high=0.2)


class Packed(NamedTuple):
    """Some texts, one behind the other: what slime and verl hand to a forward step."""

    tokens: Tensor
    """[1, t] int64."""
    bounds: Tensor
    """[texts + 1] int32."""
    answers: Answers
    """Which tokens' log-probabilities are asked for, and which of them count."""
    advantages: Tensor
    """[t] float32, that of each token's text."""
    old: Tensor
    """[t] float32, log-probabilities of the next tokens when they were drawn."""


def judge(tokens: list[int]) -> float:
    """The share of the answer's tokens that are larger than the one before."""
    return sum(a < b for a, b in zip(tokens[PROMPT - 1 :], tokens[PROMPT:], strict=False)) / ANSWER


def build_model(seed: int) -> DistributedDataParallel:
    """A GPT of two layers, whose vocabulary tensor-parallel ranks share."""
    config = TransformerConfig(
        num_layers=2, hidden_size=48, num_attention_heads=4, normalization="RMSNorm", gated_linear_unit=True,
        activation_func="silu", add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0,
        tensor_model_parallel_size=mpu.get_tensor_model_parallel_world_size(),
    )  # fmt: skip
    model_parallel_cuda_manual_seed(seed)
    model = GPTModel(
        config, get_gpt_layer_local_spec(normalization="RMSNorm"), vocab_size=VOCABULARY,
        max_sequence_length=PROMPT + ANSWER, position_embedding_type="rope",
    )  # fmt: skip
    return DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)


def write_texts(model: DistributedDataParallel, step: int) -> list[list[int]]:
    """This replica's share of a step's texts: groups of samples for the same prompt."""
    replica, replicas = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    draws = torch.Generator().manual_seed(step)
    prompts = torch.randint(VOCABULARY // 2, (PROMPTS, PROMPT), generator=draws).tolist()[replica::replicas]
    asked = [prompt for prompt in prompts for _ in range(SAMPLES)]
    model.eval()
    answers = generate(model.module, asked, max_new_tokens=ANSWER, sampling=Sampling(seed=1000 * step + replica))
    model.train()
    return [prompt + answer.tokens for prompt, answer in zip(asked, answers, strict=True)]


def pack(texts: list[list[int]]) -> list[Packed]:
    """The step's microbatches, each of whole groups; the log-probabilities are still to come."""
    rewards = torch.tensor([judge(text) for text in texts]).view(-1, SAMPLES)
    # What a text is worth beside the others of its prompt.
    relative = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
    packed = []
    for rows in torch.arange(len(texts)).chunk(MICROBATCHES):
        own = [texts[row] for row in rows.tolist()]
        lengths = torch.tensor([len(text) for text in own])
        bounds = torch.cat((lengths.new_zeros(1), lengths.cumsum(0))).int()
        places = torch.cat([torch.arange(len(text)) for text in own])
        tokens = torch.tensor([token for text in own for token in text]).unsqueeze(0)
        answers = find_answers(tokens, bounds, (places >= PROMPT).unsqueeze(0))
        packed.append(Packed(tokens, bounds, answers, relative[rows].repeat_interleave(lengths), torch.empty(0)))
    return packed


def forward_step(batches: Iterator[Packed], model: torch.nn.Module, *, learns: bool) -> tuple[Tensor, Any]:
    """The model on one microbatch, and what makes of its logits [1, t, v] the log-probabilities, or the loss."""
    batch = next(batches)
    longest = PROMPT + ANSWER
    documents = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=batch.bounds, cu_seqlens_kv=batch.bounds, max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )  # fmt: skip
    positions = torch.arange(batch.tokens.shape[1]).unsqueeze(0)
    logits = model(batch.tokens, positions, None, packed_seq_params=documents)

    def find_log_probabilities(output: Tensor) -> Tensor:
        targets = batch.answers.targets.unsqueeze(-1)
        return compute_log_probs(output, targets, mpu.get_tensor_model_parallel_group())[0].flatten()

    def find_loss(batch: Packed, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        segments, lengths = batch.answers.segments.flatten(), batch.answers.lengths
        tokens = PolicyTokens(find_log_probabilities(output), batch.old, batch.advantages, segments, lengths)
        return LOSS(tokens, mpu.get_context_parallel_group())

    def keep(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return output.sum() * 0, {"old": find_log_probabilities(output).detach()}

    return logits, partial(find_loss, batch) if learns else keep


def run_microbatches(model: DistributedDataParallel, batches: list[Packed], *, learns: bool) -> list[dict[str, Tensor]]:
    """One pass over a step's microbatches by the schedule of this layout."""
    return get_forward_backward_func()(
        forward_step_func=partial(forward_step, learns=learns),
        data_iterator=iter(batches),
        model=[model],
        num_microbatches=len(batches),
        seq_length=batches[0].tokens.shape[1],
        micro_batch_size=1,
        forward_only=not learns,
    )


def learn(steps: int, tensor_parallel: int, seed: int = 1234) -> list[float]:
    """Train, and return the mean reward of each step's texts over all replicas."""
    mpu.initialize_model_parallel(tensor_parallel)
    model = build_model(seed)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=8e-3, weight_decay=0.0, clip_grad=1.0), [model])
    rewards = []
    for step in range(steps):
        texts = write_texts(model, step)
        batches = pack(texts)
        old = run_microbatches(model, batches, learns=False)
        batches = [batch._replace(old=found["old"]) for batch, found in zip(batches, old, strict=True)]
        for _ in range(2):  # the second time with other weights than those that wrote the texts: hence the clipping
            model.zero_grad_buffer()
            run_microbatches(model, batches, learns=True)
            finalize_model_grads([model])
            optimizer.step()
        total = torch.tensor([sum(map(judge, texts)), len(texts)])
        if mpu.get_data_parallel_world_size() > 1:
            torch.distributed.all_reduce(total, group=mpu.get_data_parallel_group())
        rewards.append(float(total[0] / total[1]))
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"step {step:3d}: reward {rewards[-1]:.3f}", flush=True)
    return rewards


def main() -> None:
    """Join the other processes, if there are any, and learn."""
    parser = argparse.ArgumentParser(description="Reinforcement learning on the library, with a rule as reward.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    flags = parser.parse_args()
    if "WORLD_SIZE" in os.environ:
        torch.distributed.init_process_group("gloo")
    learn(flags.steps, flags.tensor_model_parallel_size)


if __name__ == "__main__":
    main()
    mpu.leave_job()

#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""What generality costs a single process: our parallel code with every group of size one, against a straight line.

    OMP_NUM_THREADS=1 python benchmarks/generality.py                  # CPU time, paired rounds

    straight    the same model written down as one function over flat memory: the same kernels, no layers, groups,
                placements, wrapper, schedule or optimizer class
    ours        GPTModel, DistributedDataParallel, Executor, finalize_model_grads, MegatronOptimizer

Both take a whole step: clear, forward, loss, backward, norm, clipping, AdamW. Every round runs each once, in turn, and
the ratio is taken within rounds. Goal: at most 3 %.
"""

# ruff: noqa: E402 - the path comes before the imports
from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, installed or not

import argparse
import statistics
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.conditions import print_conditions
from benchmarks.train_step import Sizes, Step, measure
from megatron.core.activations import bias_gated_activation, find_activation
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.host_memory import keep_freed_host_memory
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.megatron_optimizer import get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.pipeline_parallel.executor import Executor
from megatron.core.pipeline_parallel.schedules import one_f_one_b
from megatron.core.process_groups_config import ProcessGroupCollection, SingleRankGroup
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.products import Matmul, TableLookup, multiply
from megatron.core.transformer.core_attention.query_blocks import blocked_causal_attention
from megatron.core.transformer.norms import rms_norm
from megatron.core.transformer.residual_branch import bias_dropout_add
from megatron.core.transformer.rotary import Rotation, split_and_rotate
from megatron.core.transformer.transformer_config import TransformerConfig

EPSILON, LEARNING_RATE, WEIGHT_DECAY = 1e-5, 1e-4, 0.1


class StraightLine:
    """The model as two flat tensors (decayed and not), with views for names."""

    def __init__(self, sizes: Sizes, weights: dict[str, Tensor]) -> None:
        self.sizes, self.weights = sizes, {name: nn.Parameter(value.clone()) for name, value in weights.items()}
        decayed = [param for param in self.weights.values() if param.dim() > 1]
        others = [param for param in self.weights.values() if param.dim() == 1]
        # Two flat tensors, because weight decay is one number per call of the fused update; norms are not decayed.
        self.flats = [self._flatten(params) for params in (decayed, others)]
        self.others = others
        self.steps = torch.zeros(())
        # Rotary positions turn pairs of channels: half as many angles as a head is wide.
        half = sizes.hidden // sizes.heads // 2
        angles = torch.outer(torch.arange(float(sizes.sequence)), 10000.0 ** -(torch.arange(half) / half))
        self.rotation = Rotation(angles.cos(), angles.sin(), interleaved=False)
        self.silu, self.matmul, self.lookup = find_activation("silu"), Matmul(), TableLookup()

    @staticmethod
    def _flatten(params: list[nn.Parameter]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Values, gradients and moments of these parameters."""
        flat = torch.cat([param.detach().flatten() for param in params])
        grads = torch.zeros_like(flat)
        sizes = [param.numel() for param in params]
        for param, value, grad in zip(params, flat.split(sizes), grads.split(sizes), strict=True):
            # Parameters become views, so that one kernel updates all of them.
            param.data = value.view(param.shape)
            param.main_grad = grad.view(param.shape)  # type: ignore[attr-defined]
        return flat, grads, torch.zeros_like(flat), torch.zeros_like(flat)

    def loss(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of every token, [s, b]."""
        sizes, w = self.sizes, self.weights
        width = sizes.hidden // sizes.heads
        x = multiply(self.lookup, ids.t(), w["embedding.word_embeddings.weight"])
        for layer in range(sizes.layers):
            name = f"decoder.layers.{layer}."
            normed = rms_norm(x, w[name + "input_layernorm.weight"], EPSILON)
            packed = multiply(self.matmul, normed, w[name + "self_attention.linear_qkv.weight"])
            query, key, value = split_and_rotate(packed.unflatten(-1, (sizes.heads, 3, width)), 1, self.rotation)
            context = blocked_causal_attention(query, key, value, width**-0.5).flatten(2)
            output = multiply(self.matmul, context, w[name + "self_attention.linear_proj.weight"])
            x = bias_dropout_add(output, None, x, 0.0, True)
            normed = rms_norm(x, w[name + "pre_mlp_layernorm.weight"], EPSILON)
            inner = bias_gated_activation(
                multiply(self.matmul, normed, w[name + "mlp.linear_fc1.weight"]), None, self.silu
            )
            x = bias_dropout_add(multiply(self.matmul, inner, w[name + "mlp.linear_fc2.weight"]), None, x, 0.0, True)
        x = rms_norm(x, w["decoder.final_layernorm.weight"], EPSILON)
        logits = multiply(self.matmul, x, w["output_layer.weight"])
        return vocab_parallel_cross_entropy(logits, labels.t(), tp_group=SingleRankGroup())

    def step(self, ids: Tensor, labels: Tensor) -> float:
        """Make one update; returns the mean loss before it."""
        for _, grads, _, _ in self.flats:
            grads.zero_()
        loss = self.loss(ids, labels).mean()
        loss.backward()
        for param in self.others:
            assert param.grad is not None
            param.main_grad.add_(param.grad)  # type: ignore[attr-defined]
            param.grad = None
        with torch.no_grad():
            norm = torch.stack([torch.linalg.vector_norm(grads) for _, grads, _, _ in self.flats]).square().sum().sqrt()
            # Clipping to norm 1 as a division inside of the update: gradients are read once.
            divisor = (norm + 1e-6).clamp(min=1.0)
            self.steps += 1
            for (flat, grads, first, second), decay in zip(self.flats, (WEIGHT_DECAY, 0.0), strict=True):
                torch._fused_adamw_([flat], [grads], [first], [second], [], [self.steps], lr=LEARNING_RATE, beta1=0.9,
                                    beta2=0.999, weight_decay=decay, eps=1e-8, amsgrad=False, maximize=False,
                                    grad_scale=divisor)  # fmt: skip
        return loss.item()


class General:
    """Our pieces, as megatron/training/step.py puts them together."""

    def __init__(self, sizes: Sizes) -> None:
        config = TransformerConfig(
            num_layers=sizes.layers, hidden_size=sizes.hidden, num_attention_heads=sizes.heads,
            ffn_hidden_size=sizes.ffn, normalization="RMSNorm", gated_linear_unit=True, activation_func="silu",
            add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0, layernorm_epsilon=EPSILON,
        )  # fmt: skip
        self.groups = ProcessGroupCollection.single()
        network = GPTModel(config, get_gpt_layer_local_spec(), sizes.vocab, sizes.sequence,
                           position_embedding_type="rope", pg_collection=self.groups)  # fmt: skip
        self.weights = {name: param.detach().clone() for name, param in network.named_parameters()}
        self.model = DistributedDataParallel(
            config, DistributedDataParallelConfig(), network, pg_collection=self.groups
        )
        settings = OptimizerConfig(lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
        self.optimizer = get_megatron_optimizer(settings, [self.model], pg_collection=self.groups)
        self.executor = Executor([self.model], self.groups, config)
        self.positions = torch.arange(sizes.sequence).expand(sizes.batch, -1)

    def step(self, ids: Tensor, labels: Tensor) -> float:
        """Make one update; returns the mean loss before it."""

        def forward_step(batches: Any, model: nn.Module) -> Any:
            def loss_func(output: Tensor) -> Any:
                mean = output.mean()
                return mean, {"lm loss": mean}

            inputs, targets = next(batches)
            return model(inputs, self.positions, labels=targets), loss_func

        self.model.zero_grad_buffer()
        outputs = self.executor.run(one_f_one_b(0, 1, 1), forward_step, iter([(ids, labels)]))
        finalize_model_grads([self.model], pg_collection=self.groups)
        self.optimizer.step()
        return float(outputs.loss_dicts[0]["lm loss"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="paired rounds (default: 20)")
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--sequence", type=int, default=256)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    # As the trainer does on a CPU; both variants profit alike.
    keep_freed_host_memory()
    sizes = Sizes(layers=arguments.layers, sequence=arguments.sequence)
    print_conditions()
    print(f"{sizes}, CPU time")
    general = General(sizes)
    straight = StraightLine(sizes, general.weights)
    tokens = torch.randint(0, sizes.vocab, (sizes.batch, sizes.sequence + 1))
    ids, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    # Two steps, so that a difference in the update shows in the second loss.
    losses = [(straight.step(ids, labels), general.step(ids, labels)) for _ in range(2)]
    print("losses, straight and ours:", *(f"{a:.6f} {b:.6f};" for a, b in losses))
    variants: dict[str, Step] = {
        "straight": lambda: straight.step(ids, labels),
        "ours": lambda: general.step(ids, labels),
    }
    times = measure(variants, arguments.rounds)
    ratios = sorted(ours / line for ours, line in zip(times["ours"], times["straight"], strict=True))
    print(f"seconds a step, best: straight {min(times['straight']):.4f}, ours {min(times['ours']):.4f}")
    print(f"ours / straight: median {statistics.median(ratios):.4f}, middle half {ratios[len(ratios) // 4]:.4f} to "
          f"{ratios[-1 - len(ratios) // 4]:.4f}, of the best {min(times['ours']) / min(times['straight']):.4f} "
          "(goal: at most 1.03)")  # fmt: skip


if __name__ == "__main__":
    main()

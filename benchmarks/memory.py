#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Planned and measured bytes on every process: parameters, gradients, optimizer state and peak activations.

    OMP_NUM_THREADS=1 python benchmarks/memory.py
    OMP_NUM_THREADS=1 python benchmarks/memory.py --layouts tp2,sp dp4,fsdp2

A GPT-2 style model in float32, untied, is trained for two steps under each layout. Measured are the bytes of memory
that exists: of parameters, of gradients, of optimizer state, and the largest sum of everything that autograd keeps for
backward at one time (each piece of memory once, parameters not), while it computes something again included. Planned:

    weights, biases   h (12 h + 13) in a layer; a row layer's biases (2 h) and the norms (4 h) are held whole, the rest
                      is divided by tp. Ends: v h / tp for the embedding, as much for the output layer, s h for
                      positions, 2 h for the last norm. Parameters 4 bytes, gradients 4, moments 8.
    replicas          optimizer state / dp with dist-opt; parameters, gradients and state / dp with fsdp2
    activations       microbatches under way x layers of the stage x a + e on the stage with the loss; a and e come from
                      one process with 4 and with 8 layers. tp with sp, and cp, divide both. tp without sp divides only
                      a part of them: no plan, the measured share of one process stands alone.
    recomputation     full: x = s h instead of a layer, and of the unit that is computed again everything. Selective: a
                      is less the probabilities n s^2, the norms' 2 x, or the MLP's 8 x; the latter come back for one.
"""

# ruff: noqa: E402 - the path comes before the imports
from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, installed or not

import argparse
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from benchmarks.conditions import print_conditions
from megatron.core.transformer.execution.activation_policy import ActivationPolicy, divide_layers
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.flags.read import read_run_config
from megatron.training.launch.local_job import run_locally
from megatron.training.recipes.gpt import build_gpt_recipe
from megatron.training.run import Run
from megatron.training.step import train_step
from megatron.training.verify.parity import open_local_run
from megatron.training.verify.parity_layouts import ParityLayout, parse_layout

LAYERS, HIDDEN, SEQUENCE, VOCABULARY, MICROBATCHES = 4, 128, 64, 512, 8
LAYOUTS = ["1", "tp2", "tp2,sp", "tp4,sp", "tp2,sp,--tp-comm-overlap", "cp2", "pp2", "pp4", "tp2,sp,pp2", "dp2",
           "dp2,dist-opt", "dp4,dist-opt", "dp2,fsdp2", "dp4,fsdp2", "tp2,sp,dp2,fsdp2",
           "tp2,sp,--recompute-granularity selective",
           "tp2,sp,--recompute-granularity selective,--recompute-modules core_attn layernorm mlp",
           "tp2,sp,--recompute-granularity full,--recompute-method uniform,--recompute-num-layers 1",
           "tp2,sp,--recompute-granularity full,--recompute-method uniform,--recompute-num-layers 2",
           "tp2,sp,--recompute-granularity full,--recompute-method block,--recompute-num-layers 3",
           "tp2,sp,pp2,--recompute-granularity full,--recompute-method uniform,--recompute-num-layers 1"]  # fmt: skip
HEADS = 4
KINDS = ("parameters", "gradients", "optimizer", "activations")


class Bytes(NamedTuple):
    """Bytes that one process holds, by kind."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float | None


# Peak counters of an allocator would also count temporaries; here only what autograd keeps is asked for.
class KeptForBackward:
    """Counts the memory that is there for backward, by hooks for saved tensors.

    What autograd holds counts until it lets go. What it asked hooks to hold in another way counts until the memory is
    given back: a hook that forgets nothing, or whoever else keeps the value, saves none. Of hooks inside hooks torch
    asks the innermost only, so those that recomputation installs are made to count, too.
    """

    def __init__(self) -> None:
        self.now = self.peak = 0
        self.holders: dict[int, int] = {}
        self._watched: set[int] = set()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what autograd keeps while the context is open."""
        install = saved_tensors_hooks.__init__

        def install_counting(hooks: Any, pack: Any, unpack: Any) -> None:
            def pack_counted(tensor: Tensor) -> Any:
                # Weights are there anyway, whether or not autograd refers to them.
                if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
                    return pack(tensor)
                while_packing = _Kept(self, tensor)  # recomputation ends with the last tensor that it packs
                packed = pack(tensor)
                if not any(_is_view_of(part, tensor) for part in _list_tensors(packed)):
                    self._watch(tensor.untyped_storage())
                counted = self.count(packed)
                del while_packing
                return counted

            install(hooks, pack_counted, lambda kept: unpack(_uncounted(kept)))

        patched = mock.patch.object(saved_tensors_hooks, "__init__", install_counting)
        with patched, saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            yield

    def count(self, packed: Any) -> Any:
        """What a hook packed, with the tensors in it counted as long as it lives."""
        if isinstance(packed, tuple):
            return tuple(map(self.count, packed))
        return _Kept(self, packed) if isinstance(packed, Tensor) else packed

    def add(self, storage: torch.UntypedStorage, by: int) -> None:
        """Count a reference to a piece of memory (by = 1), or its end (by = -1)."""
        self._change(storage.data_ptr(), storage.nbytes(), by)

    def _watch(self, storage: torch.UntypedStorage) -> None:
        """Count a piece of memory once more until it is given back."""
        place, size = storage.data_ptr(), storage.nbytes()
        if place not in self._watched:
            self._watched.add(place)
            self._change(place, size, 1)
            weakref.finalize(storage, self._forget, place, size)

    def _forget(self, place: int, size: int) -> None:
        self._watched.remove(place)
        self._change(place, size, -1)

    def _change(self, place: int, size: int, by: int) -> None:
        # By memory, not by tensor: several views of one piece are counted once.
        before = self.holders.get(place, 0)
        self.holders[place] = before + by
        if before == 0 or before + by == 0:
            self.now += size * by
            self.peak = max(self.peak, self.now)


class _Kept:
    def __init__(self, count: KeptForBackward, tensor: Tensor) -> None:
        self.count, self.tensor = count, tensor
        count.add(tensor.untyped_storage(), 1)

    def __del__(self) -> None:
        self.count.add(self.tensor.untyped_storage(), -1)


def _list_tensors(packed: Any) -> list[Tensor]:
    if isinstance(packed, tuple):
        return [tensor for part in packed for tensor in _list_tensors(part)]
    return [packed] if isinstance(packed, Tensor) else []


def _is_view_of(tensor: Tensor, other: Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _uncounted(packed: Any) -> Any:
    if isinstance(packed, tuple):
        return tuple(map(_uncounted, packed))
    return packed.tensor if isinstance(packed, _Kept) else packed


def build_flags(layout: ParityLayout, layers: int) -> list[str]:
    """The run's flags; every replica has as many microbatches."""
    batch, padding = MICROBATCHES * layout.sizes["dp"], VOCABULARY // layout.sizes["tp"]
    flags = f"""--num-layers {layers} --hidden-size {HIDDEN} --num-attention-heads {HEADS} --seq-length {SEQUENCE}
        --max-position-embeddings {SEQUENCE} --micro-batch-size 1 --global-batch-size {batch} --lr 1e-3
        --train-iters 2 --hidden-dropout 0 --attention-dropout 0 --mock-data --tokenizer-type NullTokenizer
        --vocab-size {VOCABULARY - 1} --make-vocab-size-divisible-by {padding} --eval-iters 0
        --num-workers 0 --untie-embeddings-and-output-weights"""
    return [*flags.split(), *layout.flags]


def measure(rank: int, text: str, layers: int) -> Bytes:
    """Return what a process holds after two steps."""
    layout = parse_layout(text)
    config = read_run_config(build_flags(layout, layers), {"WORLD_SIZE": str(layout.world_size)})
    recipe = build_gpt_recipe(config)
    with open_local_run(config, recipe, rank) as run:
        batches = run.data.open("train", 0)
        train_step(run, batches)
        kept = KeptForBackward()
        with kept.counting():
            train_step(run, batches)
        return Bytes(*_count_static_bytes(run), kept.peak)


def _count_static_bytes(run: Run) -> tuple[int, int, int]:
    for chunk in run.model:
        chunk.finish_param_sync()
    held = [param.detach() for chunk in run.model for param in chunk.module.parameters()]
    params = [param.to_local() if isinstance(param, DTensor) else param for param in held]
    grads = [buffer.grad_data for chunk in run.model for buffer in chunk.flat_buffers]
    # The distributed optimizer holds its own slices only, which is the point.
    state = [tensor for kinds in run.optimizer.named_state().values() for tensor in kinds.values()]
    return _count_bytes(params), _count_bytes(grads), _count_bytes(state)


def _count_bytes(tensors: list[Tensor]) -> int:
    """Sum bytes, each piece of memory once."""
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(sizes.values())


def planned(layout: ParityLayout, rank: int, per_layer: float, ends: float) -> Bytes:
    """Return what the formulas at the head of this file say of a rank."""
    tp, pp, dp, cp = (layout.sizes[axis] for axis in ("tp", "pp", "dp", "cp"))
    terms = layout.text.split(",")
    stage = rank // (layout.world_size // pp)
    h, layers = HIDDEN, LAYERS // pp
    # The formula at the head of this file: divided weights and biases, then the row layers' biases and the norms.
    elements = layers * ((12 * h * h + 7 * h) / tp + 2 * h + 4 * h)
    elements += (VOCABULARY * h / tp + SEQUENCE * h) * (stage == 0) + (VOCABULARY * h / tp + 2 * h) * (stage == pp - 1)
    shards = dp if "fsdp2" in terms else 1
    state_shards = dp if {"fsdp2", "dist-opt"} & set(terms) else 1
    activations = None
    if tp == 1 or "sp" in terms:
        # 1F1B: the first stage holds as many microbatches as there are stages, the last one a single one.
        under_way = min(pp - stage, MICROBATCHES)
        model = read_run_config(build_flags(layout, LAYERS), {"WORLD_SIZE": str(layout.world_size)}).model
        last = ends if stage == pp - 1 else 0.0
        activations = plan_activations(model, layers, under_way, per_layer, last) / (tp * cp)
    return Bytes(4 * elements / shards, 4 * elements / shards, 8 * elements / state_shards, activations)


def plan_activations(model: TransformerConfig, layers: int, under_way: int, per_layer: float, ends: float) -> float:
    """Bytes of a stage, whole: the other microbatches under way, and the one that backward begins with at its peak."""
    x, policy = 4.0 * SEQUENCE * HIDDEN, ActivationPolicy(model)
    if model.recompute_granularity != "full":
        less = {"core_attn": 4.0 * HEADS * SEQUENCE**2, "layernorm": 2 * x, "mlp": 8 * x}
        again = {
            "core_attn": policy.recomputes("core_attn"),
            "layernorm": policy.recomputes("layernorm"),
            "mlp": policy.recomputes("mlp"),
        }
        kept = layers * (per_layer - sum(size for part, size in less.items() if again[part]))
        of_one_layer = (8 * x + x * again["layernorm"]) * again["mlp"]
        return under_way * kept + max(ends, of_one_layer)
    kept, peak = 0.0, 0.0
    for unit in divide_layers(model, layers):
        whole = len(unit.layers) * per_layer
        peak = max(peak, kept + whole)  # the units before it still wait
        kept += x if unit.is_recomputed else whole
    # Either the end of forward, with the loss, or the recomputation of one unit is the peak.
    return (under_way - 1) * kept + max(kept + ends, peak)


def report(layouts: list[str]) -> None:
    """One line for each layout, and for each stage of a pipeline."""
    # Two depths give two equations for the two unknowns, a layer's share and that of the ends.
    (small,), (large,) = run_locally(measure, 1, ("1", LAYERS)), run_locally(measure, 1, ("1", 2 * LAYERS))
    assert small.activations is not None and large.activations is not None
    per_layer = (large.activations - small.activations) / LAYERS
    ends = small.activations - LAYERS * per_layer
    print(f"activations of one process: {per_layer:,.0f} bytes a layer, {ends:,.0f} for the ends\n")
    print(f"{'':<32}" + "".join(f"{kind + ', kB':^32}" for kind in KINDS))
    print(f"{'layout':<26}{'rank':>6}" + f"{'planned':>12}{'measured':>10}{'of 1':>8}  " * len(KINDS))
    for text in layouts:
        layout = parse_layout(text)
        ranks = run_locally(measure, layout.world_size, (text, LAYERS))
        for rank in range(0, layout.world_size, layout.world_size // layout.sizes["pp"]):
            plan = planned(layout, rank, per_layer, ends)
            cells = ""
            for kind in KINDS:
                wanted, found = getattr(plan, kind), getattr(ranks[rank], kind)
                shown = "-" if wanted is None else f"{wanted / 1000:,.0f}"
                cells += f"{shown:>12}{found / 1000:>10,.0f}{found / getattr(small, kind):>8.3f}  "
            if len(text) > 26:
                print(text)
            print(f"{text if len(text) <= 26 else '':<26}{rank:>6}{cells}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS, help="as of tools/check_parity.py")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print_conditions()
    print(f"{LAYERS} layers, hidden {HIDDEN}, {SEQUENCE} tokens, vocabulary {VOCABULARY}, {MICROBATCHES} microbatches")
    report(arguments.layouts)


if __name__ == "__main__":
    main()

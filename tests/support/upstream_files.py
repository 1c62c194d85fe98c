# SPDX-License-Identifier: Apache-2.0
"""A writer of upstream's checkpoints for tests, by the published rules of its code and written independently of the
reader: how its ranks divide a model, how its distributed optimizer lays out its buffers, what its formats hold.

That its buckets are upstream's own is tested against the listing of a real checkpoint (test_upstream_formats.py).
"""

from __future__ import annotations

import io
import itertools
import math
import pickle
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

KINDS = ("param", "exp_avg", "exp_avg_sq")
Full = dict[str, dict[str, Tensor]]
"""kind -> parameter -> the full tensor; kind "" for the weights."""


@dataclass(frozen=True)
class Param:
    """A parameter of a rank: its local name, the full tensor it is part of, and where in that it lies."""

    local: str
    full: str
    expert: int | None = None
    shared: bool = False


@dataclass(frozen=True)
class Writer:
    """A layout of upstream's, and what it writes."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    dp: int = 2
    layers: int = 2
    experts: int = 0
    te: bool = False
    grouped: bool = False
    gated: bool = False
    biases: bool = True
    tied: bool = True
    positions: bool = True
    norm_bias: bool = True
    latent: bool = False
    """Latent attention, and experts in all layers but the first, one of which all tokens share."""
    predictions: int = 0
    """Layers of multi-token prediction."""
    bucket_size: int | None = None
    scheduler: Mapping[str, Any] = field(default_factory=lambda: {"num_steps": 40})
    """State of the learning-rate schedule."""
    per_chunk: tuple[int, ...] = ()
    """Layers of each chunk, in their order, where they are uneven."""

    def args(self, **more: Any) -> Namespace:
        """Upstream's settings, as far as they say something about the layout."""
        known = {
            "num_layers": self.layers, "tensor_model_parallel_size": self.tp, "pipeline_model_parallel_size": self.pp,
            "data_parallel_size": self.dp,
            "virtual_pipeline_model_parallel_size": self.vpp if self.vpp > 1 else None,
            "expert_model_parallel_size": self.ep, "expert_tensor_parallel_size": self.tp,
            "transformer_impl": "transformer_engine" if self.te else "local", "moe_grouped_gemm": self.grouped,
            "swiglu": self.gated, "untie_embeddings_and_output_weights": not self.tied,
            "consumed_train_samples": self.scheduler["num_steps"],
            "overlap_grad_reduce": self.bucket_size is not None, "ddp_bucket_size": self.bucket_size,
        }  # fmt: skip
        return Namespace(**(known | more))

    # ---- how the model is divided

    def chunks(self) -> Iterator[tuple[int, int, range]]:
        """(stage, chunk, layers) in the order of the layers."""
        counts = self.per_chunk or (self.layers // (self.pp * self.vpp),) * (self.pp * self.vpp)
        start = 0
        for number, count in enumerate(counts):
            yield number % self.pp, number // self.pp, range(start, start + count)
            start += count

    def registered(self, stage: int, chunk: int, ep_rank: int) -> list[Param]:
        """The parameters of a model chunk as upstream registers them."""
        layers = next(found for s, c, found in self.chunks() if (s, c) == (stage, chunk))
        found: list[Param] = []
        if (stage, chunk) == (0, 0):
            table = "embedding.word_embeddings.weight"
            found.append(Param(table, table, shared=(self.tied or self.predictions > 0) and self.pp > 1))
            position = "embedding.position_embeddings.weight"
            found += [Param(position, position)] if self.positions else []
        for local, layer in enumerate(layers):
            for theirs, ours, expert in self.in_decoder_layer(layer, ep_rank):
                found.append(Param(f"decoder.layers.{local}.{theirs}", f"decoder.layers.{layer}.{ours}", expert))
        if (stage, chunk) == (self.pp - 1, self.vpp - 1):
            if self.predictions and self.pp > 1:
                table = "embedding.word_embeddings.weight"
                found.insert(0, Param(table, table, shared=True))
            found += [Param(name, name) for name in self.final_norms()]
            found += self._in_predictions(ep_rank)
            if not self.tied:
                found.append(Param("output_layer.weight", "output_layer.weight"))
            elif self.pp > 1:
                found.append(Param("output_layer.weight", "embedding.word_embeddings.weight", shared=True))
        return found

    def in_decoder_layer(self, layer: int, ep_rank: int) -> Iterator[tuple[str, str, int | None]]:
        """(upstream's name, ours, expert) of the parameters of a layer, counted from 0."""
        return self._in_layer(ep_rank, has_experts=layer > 0 or not self.latent)

    def in_prediction_layer(self, ep_rank: int) -> Iterator[tuple[str, str, int | None]]:
        """The same of what predicts one further token."""
        return self._in_layer(ep_rank, has_experts=True)

    def final_norms(self) -> list[str]:
        """The parameters of the norm behind the decoder's layers."""
        return ["decoder.final_layernorm.weight"] + ["decoder.final_layernorm.bias"] * self.norm_bias

    def _in_predictions(self, ep_rank: int) -> list[Param]:
        found = []
        for number in range(self.predictions):
            start = f"mtp.layers.{number}."
            found += [Param(name, name) for name in (f"{start}{part}.weight" for part in ("enorm", "hnorm", "eh_proj"))]
            for theirs, ours, expert in self.in_prediction_layer(ep_rank):
                found.append(Param(f"{start}mtp_model_layer.{theirs}", f"{start}mtp_model_layer.{ours}", expert))
            found.append(Param(f"{start}final_layernorm.weight", f"{start}final_layernorm.weight"))
        return found

    def _in_layer(self, ep_rank: int, *, has_experts: bool) -> Iterator[tuple[str, str, int | None]]:
        """(upstream's name, ours, expert) of a layer's parameters."""
        norms = ("weight", "bias") if self.norm_bias else ("weight",)
        both = ("weight", "bias") if self.biases else ("weight",)

        def norm(ours: str, fused: str | None) -> Iterator[tuple[str, str, None]]:
            for part in norms:
                yield (f"{fused}.layer_norm_{part}" if fused else f"{ours}.{part}"), f"{ours}.{part}", None

        def linear(name: str) -> Iterator[tuple[str, str, None]]:
            for part in both:
                yield f"{name}.{part}", f"{name}.{part}", None

        experts = self.experts if has_experts else 0
        if not self.te or self.latent:
            yield from norm("input_layernorm", None)
        yield from linear("self_attention.linear_proj")
        if self.latent:
            for side in ("q", "kv"):
                yield from linear(f"self_attention.linear_{side}_down_proj")
                up = f"self_attention.linear_{side}_up_proj"
                if self.te:
                    yield from norm(f"self_attention.{side}_layernorm", up)
                yield from linear(up)
            for side in () if self.te else ("q", "kv"):
                yield from norm(f"self_attention.{side}_layernorm", None)
        else:
            if self.te:
                yield from norm("input_layernorm", "self_attention.linear_qkv")
            yield from linear("self_attention.linear_qkv")
        yield from norm("pre_mlp_layernorm", "mlp.linear_fc1" if self.te and not experts else None)
        if not experts:
            yield from linear("mlp.linear_fc1")
            yield from linear("mlp.linear_fc2")
            return
        yield "mlp.router.weight", "mlp.router.weight", None
        here = self.experts // self.ep
        places = [(fc, n) for fc in ("linear_fc1", "linear_fc2") for n in range(here)]
        for fc, n in places if self.grouped else sorted(places, key=lambda place: place[1]):
            name = f"mlp.experts.{fc}.weight{n}" if self.grouped else f"mlp.experts.local_experts.{n}.{fc}.weight"
            yield name, f"mlp.experts.{fc}.weight", ep_rank * here + n
        if self.latent:
            yield from linear("mlp.shared_experts.linear_fc1")
            yield from linear("mlp.shared_experts.linear_fc2")

    def rows(self) -> list[str]:
        """Parts of the names of what is cut by rows."""
        down = [] if self.te else ["down_proj"]
        return ["word_embeddings", "output_layer", "linear_qkv.", "linear_fc1.", "up_proj.weight", "eh_proj", *down]

    def shard(self, param: Param, full: Tensor, tp_rank: int) -> Tensor:
        """What a tensor-parallel rank has of a parameter."""
        tensor = full if param.expert is None else full[param.expert]
        if self.tp == 1:
            return tensor
        if any(part in param.full for part in ("linear_proj.weight", "linear_fc2.weight", "out_proj.weight")):
            return tensor.chunk(self.tp, 1)[tp_rank]
        if not any(part in param.full for part in self.rows()):
            return tensor
        return torch.cat([part.chunk(self.tp)[tp_rank] for part in self.parts(param.full, tensor)])

    def parts(self, name: str, tensor: Tensor) -> tuple[Tensor, ...]:
        """The parts of a tensor that are cut by rows one by one."""
        return tensor.chunk(2) if self.gated and "linear_fc1" in name else (tensor,)

    def separate(self, params: list[Param]) -> list[list[Param]]:
        """The parameters of each optimizer: with expert parallelism experts have one of their own."""
        if self.ep == 1:
            return [params]
        return [[p for p in params if p.expert is None], [p for p in params if p.expert is not None]]

    def optimizers(self, chunks: list[list[Param]]) -> list[int]:
        """Numbers of the optimizers of a rank with these chunks: there is none without parameters."""
        parts = [self.separate(params) for params in chunks]
        return [number for number in range(len(parts[0])) if any(part[number] for part in parts)]

    # ---- legacy files

    def write_torch(self, root: Path, full: Full, *, distributed: bool, step: int = 10) -> Path:
        """A `torch` checkpoint; distributed: with the state of the distributed optimizer."""
        for tp, stage, ep in itertools.product(range(self.tp), range(self.pp), range(self.ep)):
            name = f"mp_rank_{tp:02d}" + f"_{stage:03d}" * (self.pp > 1) + f"_{ep:03d}" * (self.ep > 1)
            path = root / "iter_0000010" / name
            path.mkdir(parents=True)
            self._write_rank(path, full, (tp, stage, ep), distributed, step)
        return root

    def _write_rank(self, path: Path, full: Full, rank: tuple[int, int, int], distributed: bool, step: int) -> None:
        tp, stage, ep = rank
        chunks = [self.registered(stage, chunk, ep) for chunk in range(self.vpp)]
        models = [{p.local: self.shard(p, full[""][p.full], tp).clone() for p in params} for params in chunks]
        for params, model in zip(chunks, models, strict=True):
            # A buffer, which no optimizer knows.
            for p in params:
                name = p.full.replace("router.weight", "router.expert_bias")
                if name != p.full and name in full[""]:
                    model[p.local.replace("router.weight", "router.expert_bias")] = full[""][name].clone()
        content = {"args": self.args(), "iteration": 10, "opt_param_scheduler": dict(self.scheduler)}
        content |= {"model": models[0]} if self.vpp == 1 else {f"model{i}": m for i, m in enumerate(models)}
        if distributed:
            states = [
                self.joined_state(full, [self.separate(params)[number] for params in chunks], rank)
                if number or ep == 0 else None
                for number in self.optimizers(chunks)
            ]  # fmt: skip
            torch.save(states if len(states) > 1 else states[0], path / "distrib_optim.pt")
            groups = {"optimizer": {"param_groups": [{"step": step, "wd_mult": 1.0, "params": []}]}}
            content["optimizer"] = [groups] * len(states) if len(states) > 1 else groups
        else:
            optimizers = [
                self._plain_state(full, [self.separate(params)[number] for params in chunks], tp, number, step)
                for number in self.optimizers(chunks)
            ]
            content["optimizer"] = optimizers if len(optimizers) > 1 else optimizers[0]
        torch.save(content, path / "model_optim_rng.pt")

    def _plain_state(self, full: Full, chunks: list[list[Param]], tp: int, number: int, step: int) -> dict[str, Any]:
        every = [p for params in chunks for p in params]
        vectors = [p for p in every if full[""][p.full].dim() - (p.expert is not None) == 1]
        groups = [[p for p in every if p not in vectors], vectors]
        state: dict[int, dict[str, Any]] = {}
        saved = []
        for mult, group in zip((1.0, 0.0), groups, strict=True):
            first = len(state)
            for p in group:
                state[len(state)] = {
                    "step": torch.tensor(float(step)),
                    **{kind: self.shard(p, full[kind][p.full], tp).clone() for kind in KINDS[1:]},
                }
            if group:
                indices = list(range(first, len(state)))
                saved.append({"wd_mult": mult, "is_expert_parallel": number == 1, "params": indices})
        main = [[self.shard(p, full["param"][p.full], tp).clone() for p in group] for group in groups if group]
        return {"optimizer": {"state": state, "param_groups": saved}, "fp32_from_fp16_params": main}

    # ---- flat buffers

    def lay_out(
        self, params: list[Param], shapes: dict[str, tuple[int, ...]], stage: int, chunk: int
    ) -> tuple[list[tuple[Param, int, int, int]], list[tuple[int, int, int]]]:
        """Upstream's loop over the parameters of a buffer, last one first: (parameter, start, end, bucket), and
        (start, end without padding, end) of each bucket."""
        limit = self.bucket_size if stage == 0 and chunk == 0 else None
        multiple = math.lcm(self.dp, 128)
        placed: list[tuple[Param, int, int, int]] = []
        buckets: list[tuple[int, int, int]] = []
        start = bucket_start = 0
        pending = 0

        def close(end: int) -> int:
            nonlocal bucket_start, pending
            padded = -(-end // multiple) * multiple
            buckets.append((bucket_start, end, padded))
            bucket_start, pending = padded, 0
            return padded

        for param in reversed(params):
            start = -(-start // 64) * 64
            if param.shared and pending:
                start = -(-start // multiple) * multiple if start % self.dp else start
                start = max(start, close(start))
            end = start + math.prod(shapes[param.local])
            placed.append((param, start, end, len(buckets)))
            pending += 1
            start = end
            if param.shared or (limit is not None and end - bucket_start >= limit):
                start = close(end)
        if pending:
            close(start)
        return placed, buckets

    def flat_buffers(
        self, full: Full, chunks: list[list[Param]], rank: tuple[int, int, int]
    ) -> list[tuple[dict[str, Tensor], list[tuple[int, int, int]], list[tuple[Param, int, int, int]]]]:
        """For each model chunk the whole buffer of each kind, its buckets and its parameters."""
        found = []
        tp, stage, _ = rank
        for chunk, params in enumerate(chunks):
            # There is no buffer without parameters, and none is left out in counting.
            if not params:
                continue
            shapes = {p.local: tuple(self.shard(p, full["param"][p.full], tp).shape) for p in params}
            placed, buckets = self.lay_out(params, shapes, stage, chunk)
            buffers = {kind: torch.full((buckets[-1][2] if buckets else 0,), float("nan")) for kind in KINDS}
            for param, start, end, _ in placed:
                for kind in KINDS:
                    buffers[kind][start:end] = self.shard(param, full[kind][param.full], tp).reshape(-1)
            found.append((buffers, buckets, placed))
        return found

    def joined_state(self, full: Full, chunks: list[list[Param]], rank: tuple[int, int, int]) -> dict[Any, Any]:
        """As get_parameter_state_dp_zero: buckets one behind the other without what pads their ends."""
        state: dict[Any, Any] = {"buckets_coalesced": True}
        for number, (buffers, buckets, _) in enumerate(self.flat_buffers(full, chunks, rank)):
            world: dict[str, Any] = {
                kind: torch.cat([buffer[start:end] for start, end, _ in buckets]) for kind, buffer in buffers.items()
            }
            world["numel_unpadded"] = len(world["param"])
            state[number] = {(torch.bfloat16, torch.float32): world}
        return state

    # ---- torch_dist

    def write_torch_dist(self, root: Path, full: Full, sharding: str, *, step: int = 10) -> Path:
        """A `torch_dist` checkpoint whose optimizer state is of this sharding type of upstream's."""
        files = DistFiles(root / "iter_0000010")
        for name, tensor in full[""].items():
            for key, at, values in self.as_saved(name, tensor):
                files.add_layer(key, at, values, self.layers)
        common: dict[str, Any] = {
            "args": self.args(), "iteration": 10, "opt_param_scheduler": dict(self.scheduler),
            "optimizer": {"param_state_sharding_type": sharding},
            "content_metadata": {"distrib_optim_sharding_type": sharding},
        }  # fmt: skip
        if sharding == "fully_sharded_model_space":
            common["optimizer"]["optimizer"] = {"param_groups": [{"step": float(step)}]}
            for kind in KINDS:
                for name, tensor in full[kind].items():
                    self._add_flat_shards(files, kind, name, tensor)
        else:
            self._add_buckets(files, full, sharding, step)
        files.objects["common_state/shard_0_1"] = [common]
        files.finish()
        return root

    def as_saved(self, name: str, tensor: Tensor) -> Iterator[tuple[str, int | None, Tensor]]:
        """(upstream's key, layer of the stack, values)."""
        if not name.startswith("decoder.layers."):
            yield name.replace("mlp.experts.", "mlp.experts.experts."), None, tensor
            return
        _, _, layer, rest = name.split(".", 3)
        if self.latent:
            for side in ("q", "kv") if self.te else ():
                rest = rest.replace(f"{side}_layernorm.", f"linear_{side}_up_proj.layer_norm_")
            # Layers that differ are saved one by one.
            yield f"decoder.layers.{layer}." + rest.replace("mlp.experts.", "mlp.experts.experts."), None, tensor
            return
        rest = rest.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        if not self.experts:
            rest = rest.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        yield "decoder.layers." + rest.replace("mlp.experts.", "mlp.experts.experts."), int(layer), tensor

    def _add_flat_shards(self, files: DistFiles, kind: str, name: str, tensor: Tensor) -> None:
        kind = "fp32_param" if kind == "param" else kind
        for key, layer, values in self.as_saved(name, tensor):
            expert = [1] if ".experts." in name else []
            cuts = [1] * (values.dim() - len(expert))
            if any(part in name for part in ("linear_proj.weight", "linear_fc2.weight", "out_proj.weight")):
                cuts[1] = self.tp
            elif any(part in name for part in self.rows()):
                cuts[0] = self.tp * (2 if self.gated and "linear_fc1" in name else 1)
            cuts = [values.shape[0]] * len(expert) + cuts
            shard = [size // cut for size, cut in zip(values.shape, cuts, strict=True)]
            full_key = f"optimizer.state.{kind}.{key}"
            # A vector outside of the layers stays as it is.
            if layer is None and values.dim() == 1:
                files.add(full_key, [0], values, list(values.shape))
                continue
            lead, depth = ([], []) if layer is None else ([layer], [self.layers])
            for place in torch.cartesian_prod(*(torch.arange(cut) for cut in cuts)).view(-1, len(cuts)).tolist():
                bounds = [slice(i * size, (i + 1) * size) for i, size in zip(place, shard, strict=True)]
                flat = values[tuple(bounds)].reshape(-1)
                # As two data-parallel ranks would save it.
                middle = len(flat) // 2
                for start, stop in ((0, middle), (middle, len(flat))):
                    part = flat[start:stop].view(*[1] * (len(lead) + len(cuts)), -1)
                    files.add(full_key, [*lead, *place, start], part, [*depth, *cuts, len(flat)])

    def _add_buckets(self, files: DistFiles, full: Full, sharding: str, step: int) -> None:
        optimizers = range(len(self.separate([])))
        for tp, stage, ep, number in itertools.product(range(self.tp), range(self.pp), range(self.ep), optimizers):
            chunks = [self.registered(stage, chunk, ep) for chunk in range(self.vpp)]
            if (number == 0 and ep) or number not in self.optimizers(chunks):
                continue
            mine = [self.separate(params)[number] for params in chunks]
            group = (stage * self.ep + ep) * self.tp + tp if number else stage * self.tp + tp
            prefix = (
                f"chained_{number}." * (len(self.optimizers(chunks)) > 1)
                + f"optimizer.distributed.dp_group_idx_{group}."
            )
            self._add_rank(files, full, mine, (tp, stage, ep), prefix, sharding)
            files.objects[f"{prefix}optimizer/shard_0_1"] = [{"param_groups": [{"step": float(step)}]}]

    def _add_rank(
        self,
        files: DistFiles,
        full: Full,
        chunks: list[list[Param]],
        rank: tuple[int, int, int],
        prefix: str,
        sharding: str,
    ) -> None:
        if sharding == "dp_zero_gather_scatter":
            files.objects[f"{prefix}param_state/shard_0_1"] = [self.joined_state(full, chunks, rank)]
            return
        numbers: list[dict[Any, list[int]]] = []
        for buffer, (buffers, buckets, placed) in enumerate(self.flat_buffers(full, chunks, rank)):
            numbers.append({"(torch.bfloat16, torch.float32)": [end - start for start, end, _ in buckets]})
            for index, (start, unpadded, padded) in enumerate(buckets):
                end = padded if sharding == "fully_sharded_bucket_space" else unpadded
                # Boxes end where a parameter or the share of a data-parallel rank does.
                share = (padded - start) // self.dp
                cuts = {start, end, *(start + i * share for i in range(1, self.dp))}
                cuts |= {place for _, a, b, bucket in placed if bucket == index for place in (a, b)}
                inside = sorted(cut for cut in cuts if start <= cut <= end)
                for kind, values in buffers.items():
                    key = f"{prefix}gbuf_idx_{buffer}.dtype_(torch.bfloat16, torch.float32).bucket_idx_{index}.{kind}"
                    for a, b in zip(inside, inside[1:], strict=False):
                        files.add(key, [a - start], values[a:b], [end - start])
        files.objects[f"{prefix}per_bucket_numel_unpadded/shard_0_1"] = [numbers]


class DistFiles:
    """A directory in the format of torch.distributed.checkpoint, written box by box."""

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True)
        self.path = path
        self.objects: dict[str, Any] = {}
        self.entries: dict[str, Any] = {}
        self.places: dict[MetadataIndex, _StorageInfo] = {}
        self.file = open(path / "__0_0.distcp", "wb")  # noqa: SIM115

    def add_layer(self, key: str, layer: int | None, values: Tensor, layers: int) -> None:
        """A whole tensor, or one layer of a stack."""
        if layer is None:
            self.add(key, [0] * values.dim(), values, list(values.shape))
        else:
            self.add(key, [layer] + [0] * values.dim(), values[None], [layers, *values.shape])

    def add(self, key: str, offsets: list[int], values: Tensor, size: list[int]) -> None:
        """A box of a tensor."""
        fresh = TensorStorageMetadata(TensorProperties(values.dtype), torch.Size(size), [])
        entry = self.entries.setdefault(key, fresh)
        assert list(entry.size) == size, key
        entry.chunks.append(ChunkStorageMetadata(torch.Size(offsets), values.shape))
        self._write(MetadataIndex(key, torch.Size(offsets)), values.clone())

    def _write(self, index: MetadataIndex, content: Any) -> None:
        stream = io.BytesIO()
        torch.save(content, stream)
        start = self.file.tell()
        self.file.write(stream.getvalue())
        self.places[index] = _StorageInfo("__0_0.distcp", start, self.file.tell() - start)

    def finish(self) -> None:
        """Write the objects and the table of contents."""
        for key, content in self.objects.items():
            self.entries[key] = BytesStorageMetadata()
            self._write(MetadataIndex(key), content)
        self.file.close()
        (self.path / ".metadata").write_bytes(pickle.dumps(Metadata(self.entries, storage_data=self.places)))
        (self.path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
        (self.path.parent / "latest_checkpointed_iteration.txt").write_text("10")

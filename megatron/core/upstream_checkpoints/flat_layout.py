# SPDX-License-Identifier: Apache-2.0
"""Upstream's layout of a model over its ranks: which dimension of a tensor is cut, in which order the parameters of a
rank are registered, and where they lie in the flat buffers of its distributed optimizer.

    buffer of a model chunk    | bucket 0                                  | bucket 1 ...
    parameters, last one first | output_layer | final_layernorm | fc2 | ...
    each starts at a multiple of 64 elements of its bucket

Nothing of this is written in a checkpoint; it follows from how upstream builds its modules and its gradient buffers
(param_and_grad_buffer.py there), and from the sizes of the buckets, which are. Names are ours (names.py).
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.errors import CheckpointError
from megatron.core.upstream_checkpoints.sections import find_rows

_CUT_BY_ROWS = re.compile(
    r"(.*\.)?(word_embeddings\.weight|output_layer\.(weight|bias)|softmax_offset|(eh|e|h)_proj\.weight|mixer\.norm\.weight"
    r"|(mixer|self_attention)\.(in_proj\.weight|conv1d[._](weight|bias)|dt_bias|A_log|D)"
    r"|(self_attention|mlp)\.(weight|bias)"  # a matrix in place of the whole branch
    r"|(linear_qkv|linear_q_proj|linear_q_up_proj|linear_kv_up_proj|linear_fc1)\.(weight|bias))"
)
_CUT_BY_COLUMNS = re.compile(r".*\.(linear_proj|linear_fc2|out_proj)\.weight")
_CUT_WITHOUT_FUSION = re.compile(r".*\.(linear_q_down_proj|linear_kv_down_proj)\.(weight|bias)")
"""Of latent attention: by rows, but with Transformer Engine each rank has all of it."""
LAYER = re.compile(r"decoder\.layers\.(?P<number>\d+)\.(?P<rest>.+)")
"""A tensor of a layer of the decoder."""
_PREDICTION_LAYER = re.compile(r"mtp\.layers\.(?P<number>\d+)\.(?P<rest>.+)")
_LETTER = re.compile(r"layers\.(?P<number>\d+)\.(?P<rest>.+)")
"""A layer of a depth of multi-token prediction in letters, after mtp_model_layer."""
_PREDICTION_MODULES = ("enorm", "hnorm", "eh_proj", "mtp_model_layer", "final_layernorm")
_ALIGNMENT = 64
"""In elements: where a parameter of a bucket may start."""
_BUCKET_MULTIPLE, _WIDE_BUCKET_MULTIPLE = 128, 2**16
"""In elements: of what the size of a padded bucket is a multiple, and for buckets that are padded for bandwidth."""

_NORM = "input_layernorm"
_MODULES = (
    _NORM,
    "self_attention.core_attention", "self_attention.linear_proj",
    "self_attention.linear_q_proj", "self_attention.linear_q_down_proj", "self_attention.linear_q_up_proj",
    "self_attention.linear_kv_down_proj", "self_attention.linear_kv_up_proj", "self_attention.linear_qkv",
    "self_attention.q_layernorm", "self_attention.k_layernorm", "self_attention.kv_layernorm",
    "pre_mlp_layernorm", "mlp.router", "mlp.fc1_latent_proj", "mlp.fc2_latent_proj",
    "mlp.experts", "mlp.linear_fc1", "mlp.linear_fc2",
    "mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2", "mlp.shared_experts.gate_weight",
)  # fmt: skip
"""The modules of a layer in the order in which upstream's implementation registers them."""
_BEFORE_IN_PROJ = (
    "mixer.conv1d", "mixer.dt_bias", "mixer.A_log", "mixer.D", "self_attention.dt_bias", "self_attention.A_log",
)  # fmt: skip
_MIXER_MODULES = (
    "mixer.in_proj", "mixer.norm", "mixer.out_proj",
    "self_attention.in_proj", "self_attention.conv1d", "self_attention.out_norm", "self_attention.out_proj",
)  # fmt: skip
"""Of state mixers: a mixer's direct parameters come first, in Mamba-2 the convolution, too."""
_FUSED_MODULES = (*_MODULES[1:8], *_BEFORE_IN_PROJ, _NORM, *_MIXER_MODULES, *_MODULES[8:])
"""The same with Transformer Engine, where the norm before a linear layer is part of it."""
_FUSED_LATENT_MODULES = (
    *_MODULES[:5], "self_attention.q_layernorm", "self_attention.linear_q_up_proj",
    "self_attention.linear_kv_down_proj", "self_attention.kv_layernorm", "self_attention.linear_kv_up_proj",
    *_MODULES[12:],
)  # fmt: skip
"""The same of latent attention, whose first norm is separate."""


# ---- ranks


@dataclass(frozen=True)
class SavedLayout:
    """Over how many ranks a checkpoint of upstream's was written."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    """Model chunks of each pipeline stage."""
    ep: int = 1
    etp: int = 1
    """Tensor-parallel size of the experts."""

    @classmethod
    def read(cls, args: Mapping[str, Any], where: str) -> SavedLayout:
        """From the settings of the saved run. Raises CheckpointError, with `where` in it, for impossible ones."""
        tp = _size(args, "tensor_model_parallel_size", where)
        return cls(
            tp,
            _size(args, "pipeline_model_parallel_size", where),
            _size(args, "virtual_pipeline_model_parallel_size", where),
            _size(args, "expert_model_parallel_size", where),
            _size(args, "expert_tensor_parallel_size", where, tp),
        )

    @property
    def order_of_chunks(self) -> list[tuple[int, int]]:
        """(stage, chunk of it) in the order of the layers."""
        return [(stage, chunk) for chunk in range(self.vpp) for stage in range(self.pp)]


def _size(args: Mapping[str, Any], name: str, where: str, default: int = 1) -> int:
    value = args.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**20:
        raise CheckpointError(f"{where}: its settings say {name} {value!r}; expected a positive number")
    return value


# ---- cuts


@dataclass(frozen=True)
class Cut:
    """Division of a tensor among tensor-parallel ranks."""

    dim: int | None = None
    """The dimension that is cut; None where each rank has all of it."""
    parts: tuple[int, ...] = (1,)
    """Sizes, over any unit, of the parts along it that are cut one by one: a gate and an up projection, the sections of
    a mixer."""

    def shard_shape(self, full: Sequence[int], ranks: int) -> tuple[int, ...] | None:
        """Shape of one of the ranks' shards; None where they cannot have equal ones."""
        if self.dim is None:
            return tuple(full)
        if self.dim >= len(full) or full[self.dim] % sum(self.parts):
            return None
        if any(size % ranks for size in self.sizes(full[self.dim])):
            return None
        return (*full[: self.dim], full[self.dim] // ranks, *full[self.dim + 1 :])

    def full_shape(self, shard: Sequence[int], ranks: int) -> tuple[int, ...]:
        """Shape of the tensor of which `shard` is one of the ranks' shapes."""
        if self.dim is None or self.dim >= len(shard):
            return tuple(shard)
        return (*shard[: self.dim], shard[self.dim] * ranks, *shard[self.dim + 1 :])

    def runs(self, size: int, ranks: int, rank: int) -> list[tuple[int, int, int]]:
        """Return what a rank has of `size` rows or columns: (start in the tensor, start in the shard, length)."""
        found, start = [], 0
        for part in self.sizes(size):
            length = part // ranks
            found.append((start + rank * length, start // ranks, length))
            start += part
        return found

    def sizes(self, size: int) -> list[int]:
        """The rows or columns of each part, of `size` in all: of the tensor, or of a rank's."""
        return [part * size // sum(self.parts) for part in self.parts]


def find_cut(name: str, args: Mapping[str, Any]) -> Cut:
    """Return how upstream, with these settings, cuts the tensor with this name; an expert's without the dimension of
    the experts."""
    if _CUT_BY_COLUMNS.fullmatch(name):
        return Cut(1)
    if _CUT_WITHOUT_FUSION.fullmatch(name) and args.get("transformer_impl") == "local":
        return Cut(0)
    is_gated = args.get("swiglu") or args.get("quick_geglu") or args.get("gated_linear_unit")
    kind = "moe_shared_expert_glu_interleave_size" if ".shared_experts." in name else "moe_mlp_glu_interleave_size"
    takes_turns = args.get(kind) and "experts." in name
    if _CUT_BY_ROWS.fullmatch(name):
        is_pair = is_gated and not takes_turns and ".linear_fc1." in name
        return Cut(0, (1, 1) if is_pair else tuple(find_rows(name, args).values()) or (1,))
    return Cut()


# ---- the order of parameters


@dataclass(frozen=True)
class Parameter:
    """A parameter as one of upstream's ranks has it."""

    name: str
    """Of the tensor in the whole model that it is, or is a part of."""
    shape: tuple[int, ...]
    """Of this rank's shard."""
    expert: int | None = None
    """The expert in the tensor `name` that this is; None where that is not a stack of experts."""
    is_alone: bool = False
    """True if it has a separate bucket: a table that two pipeline stages share."""

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@functools.cache
def order_modules(*, fused: bool, is_latent: bool = False) -> dict[str, int]:
    """Number the modules of a layer as upstream registers them. is_latent: a layer of latent attention."""
    order = _MODULES if not fused else _FUSED_LATENT_MODULES if is_latent else _FUSED_MODULES
    return {name: number for number, name in enumerate(order)}


def sort_as_registered(parameters: Iterable[Parameter], *, fused: bool, grouped: bool) -> list[Parameter]:
    """The parameters of a model chunk in the order in which upstream registers them.

    fused: norms are part of the linear layers after them (Transformer Engine). grouped: the first layers of all experts
    come before their second ones. Raises CheckpointError for a name whose place is not known.
    """
    parameters = list(parameters)
    latent = {each.name.partition(".self_attention.")[0] for each in parameters if ".linear_kv_down_proj." in each.name}

    def place_in_layer(parameter: Parameter, rest: str) -> tuple[int, ...]:
        is_latent = parameter.name.removesuffix(f".{rest}") in latent
        modules = order_modules(fused=fused, is_latent=is_latent)
        module = next((module for module in modules if rest.startswith(f"{module}.") or rest == module), rest)
        if module not in modules:
            raise CheckpointError(f"{parameter.name}: its place in upstream's flat buffers is not known")
        second = int(".linear_fc2." in rest)
        inside = (second, parameter.expert or 0) if grouped else (parameter.expert or 0, second)
        return (modules[module], *inside, int(rest.endswith(".bias")))

    def place(parameter: Parameter) -> tuple[int, ...]:
        name = parameter.name
        ending = int(name.endswith(".bias"))
        if name.startswith("embedding."):
            return (0, int("position_embeddings" in name))
        found = LAYER.fullmatch(name)
        if found is not None:
            return (1, int(found["number"]), *place_in_layer(parameter, found["rest"]))
        if name.startswith(("decoder.final_layernorm.", "decoder.final_norm.")):
            return (2, ending)
        found = _PREDICTION_LAYER.fullmatch(name)
        if found is not None:
            part, _, rest = found["rest"].partition(".")
            if part in _PREDICTION_MODULES:
                letter = _LETTER.fullmatch(rest)
                number, rest = (int(letter["number"]), letter["rest"]) if letter else (0, rest)
                inner = (number, *place_in_layer(parameter, rest)) if part == "mtp_model_layer" else (ending,)
                return (3, int(found["number"]), _PREDICTION_MODULES.index(part), *inner)
        if name.startswith("output_layer."):
            return (4, ending)
        raise CheckpointError(f"{name}: its place in upstream's flat buffers is not known")

    return sorted(parameters, key=place)


# ---- buckets


@dataclass(frozen=True)
class BucketSlot:
    """Place of a parameter: elements [start, start + its number) of a bucket."""

    bucket: int
    start: int


@dataclass(frozen=True)
class BucketPadding:
    """Upstream's padding of the ends of buckets."""

    shares: int
    """Data-parallel ranks that have equal parts of each bucket."""
    for_bandwidth: bool = False
    """--ddp-pad-buckets-for-high-nccl-busbw."""

    def pad(self, size: int) -> int:
        """Elements of a bucket with what pads its end."""
        multiple = math.lcm(self.shares, _BUCKET_MULTIPLE, _WIDE_BUCKET_MULTIPLE if self.for_bandwidth else 1)
        return -(-size // multiple) * multiple


def place_in_buckets(parameters: Sequence[Parameter], sizes: Sequence[int]) -> list[BucketSlot] | None:
    """Return where the parameters of a buffer lie, whose buckets have these sizes without what pads their ends.

    parameters: as registered. None where they do not fill the buckets.
    """
    slots: list[BucketSlot] = []
    bucket, end = 0, 0
    for parameter in reversed(parameters):
        start = _align(end)
        is_full = bucket < len(sizes) and start + parameter.numel > sizes[bucket] and sizes[bucket] - end < _ALIGNMENT
        if is_full or (parameter.is_alone and end):
            bucket, start = bucket + 1, 0
        if bucket >= len(sizes) or start + parameter.numel > sizes[bucket]:
            return None
        slots.append(BucketSlot(bucket, start))
        end = start + parameter.numel
    # A bucket that ends because the next parameter wants a separate one may be padded.
    filled = bucket == len(sizes) - 1 and sizes[bucket] - end < _ALIGNMENT if sizes else not parameters
    return slots[::-1] if filled else None


def place_in_joined_buckets(
    parameters: Sequence[Parameter], total: int, bucket_size: int | None
) -> list[BucketSlot] | None:
    """The same where the buckets were joined, without what pads their ends; of a single bucket 0.

    total: elements. bucket_size: from which number of elements on upstream closed a bucket; None for never.
    """
    slots, sizes = fill_buckets(parameters, bucket_size, BucketPadding(1))
    starts = list(itertools.accumulate(sizes, initial=0))
    return [BucketSlot(0, starts[slot.bucket] + slot.start) for slot in slots] if starts[-1] == total else None


def fill_buckets(
    parameters: Sequence[Parameter], bucket_size: int | None, padding: BucketPadding
) -> tuple[list[BucketSlot], list[int]]:
    """Return where upstream puts the parameters of a buffer, and the sizes of its buckets without what pads their ends.

    parameters: as registered. bucket_size: from which number of elements on a bucket is closed; None for never.
    """
    slots: list[BucketSlot] = []
    sizes: list[int] = []
    end = 0
    is_open = False
    for parameter in reversed(parameters):
        start = _align(end)
        if parameter.is_alone and is_open:
            # Here, and nowhere else, upstream counts the padding as well.
            sizes.append(padding.pad(start) if start % padding.shares else start)
            start = 0
        slots.append(BucketSlot(len(sizes), start))
        end, is_open = start + parameter.numel, True
        if parameter.is_alone or (bucket_size is not None and end >= bucket_size):
            sizes.append(end)
            end, is_open = 0, False
    return slots[::-1], [*sizes, end] if is_open else sizes


def find_bucket_size(args: Mapping[str, Any], stage: int, chunk: int, elements: int) -> int | None:
    """From how many elements on upstream closed a bucket; None where it has only one."""
    if not args.get("overlap_grad_reduce") or stage or chunk:
        return None
    number, size = args.get("ddp_num_buckets"), args.get("ddp_bucket_size")
    if isinstance(number, int) and number > 0:
        return elements // number
    return size if isinstance(size, int) else max(40_000_000, 1_000_000 * int(args.get("data_parallel_size") or 1))


def _align(position: int) -> int:
    return -(-position // _ALIGNMENT) * _ALIGNMENT

# SPDX-License-Identifier: Apache-2.0
"""Upstream's small tools around a process and its groups: versions of packages, ranges in a profile, groups by name,
boxes for tensors, parameters compared between replicas."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from megatron.core.collectives import all_gather_object, broadcast, receive, send
from megatron.core.device import NamedRange, current_device
from megatron.core.errors import ConfigError
from megatron.core.mesh import list_rank_groups
from megatron.core.placement import get_placement
from megatron.core.process_groups_config import Group, ProcessGroupCollection
from megatron.core.stacked_parameters import list_parameters

T = TypeVar("T")
HAVE_FA3 = False
"""FlashAttention 3 is never imported; --attention-backend flash takes torch's kernel."""
_batched_p2p_ops = None
"""Replaced by programs for custom devices. Nothing reads it: stages exchange by megatron.core.collectives."""


# ---- versions


def get_torch_version() -> TorchVersion:
    """torch's version, to be compared with texts and with packaging's Version."""
    return TorchVersion(torch.__version__)


def get_te_version() -> TorchVersion | None:
    """Transformer Engine's version; None where it is not installed."""
    return _find_version("transformer-engine")


def is_torch_min_version(version: str, check_equality: bool = True) -> bool:
    """Return whether torch is at least of this version; check_equality: that version itself counts."""
    return _is_at_least(get_torch_version(), version, check_equality)


def is_te_min_version(version: str, check_equality: bool = True) -> bool:
    """The same of Transformer Engine; False without it."""
    return _is_at_least(get_te_version(), version, check_equality)


def is_fa_min_version(version: str, check_equality: bool = True) -> bool:
    """The same of FlashAttention; False without it."""
    return _is_at_least(_find_version("flash-attn"), version, check_equality)


def _is_at_least(found: TorchVersion | None, wanted: str, check_equality: bool) -> bool:
    # A local part ("+cpu", "+cu128") says how a package was built, and would sort above the release itself.
    have = None if found is None else TorchVersion(found.partition("+")[0])
    return have is not None and (have >= wanted if check_equality else have > wanted)


def _find_version(distribution: str) -> TorchVersion | None:
    try:
        return TorchVersion(metadata.version(distribution))
    except metadata.PackageNotFoundError:
        return None


# ---- ranges in a profile, and what else a forward of upstream's calls first


class OpenRanges:
    """The ranges of this process that nvtx_range_push began, innermost last."""

    ranges: ClassVar[list[NamedRange]] = []


def nvtx_range_push(msg: str | None = None, suffix: str | None = None) -> None:
    """Begin a range of a profile, called msg.suffix; msg is the caller's name when None. Outside of a profile it costs
    microseconds."""
    named = NamedRange(".".join(filter(None, (msg or sys._getframe(1).f_code.co_qualname, suffix))))
    named.__enter__()
    OpenRanges.ranges.append(named)


def nvtx_range_pop(msg: str | None = None, suffix: str | None = None) -> None:
    """End the range that was begun last. Raises RuntimeError where none is open, or one of another msg or suffix."""
    name = OpenRanges.ranges[-1].name if OpenRanges.ranges else None
    if name is None or not name.startswith(msg or "") or not name.endswith(suffix or ""):
        raise RuntimeError(f"nvtx_range_pop({msg!r}, {suffix!r}) ends no open range; the innermost one is {name!r}")
    OpenRanges.ranges.pop().__exit__()


def deprecate_inference_params(inference_context: Any, inference_params: Any) -> Any:
    """The first, or where that is None the second with a warning: it is the first one's former name."""
    if inference_context is None and inference_params is not None:
        warnings.warn("inference_params is deprecated; use inference_context", DeprecationWarning, stacklevel=2)
        return inference_params
    return inference_context


def make_viewless_tensor(inp: Tensor, requires_grad: bool, keep_graph: bool) -> Tensor:
    """The tensor without what it is a view of: itself with keep_graph, else outside of any graph."""
    # Outputs of stages are kept until their backward, so that nothing is won by hiding what a view belongs to.
    return inp if keep_graph else inp.detach().requires_grad_(requires_grad)


class WrappedTensor:
    """A box with one tensor, out of which the callee takes it, so that the caller no longer holds it."""

    def __init__(self, tensor: Tensor) -> None:
        self._wrapper = [tensor]

    def unwrap(self) -> Tensor:
        """The tensor; the box is empty afterwards. Raises RuntimeError where it is already."""
        if not self._wrapper:
            raise RuntimeError("WrappedTensor is empty; unwrap() gives its tensor once")
        return self._wrapper.pop()


def apply_module(m: Callable[..., T], *, check_subclass: bool = True) -> Callable[..., T]:
    """The module itself, for a type checker a function of its forward. check_subclass: of upstream's signature."""
    return m


def jit_fuser(func: Callable[..., T]) -> Callable[..., T]:
    """The function as it is: operations are fused by kernels of ours, or by TransformerConfig(compile=True)."""
    return func


def has_config_logger_enabled(config: Any) -> bool:
    """Return whether `config.config_logger_dir` is set; False where there is no such field."""
    return bool(getattr(config, "config_logger_dir", ""))


def log_config_to_disk(config: Any, dict_data: Mapping[str, Any], prefix: str = "", rank_str: str = "") -> None:
    """Write arguments as JSON to config.config_logger_dir. prefix: begins the file's name; the class of
    dict_data["self"] when empty. rank_str: this process; its global rank when empty."""
    if not has_config_logger_enabled(config):
        raise ConfigError("log_config_to_disk() needs config.config_logger_dir; it is not set")
    name = prefix or type(dict_data.get("self", dict_data)).__name__
    rank = rank_str or str(dist.get_rank() if dist.is_initialized() else 0)
    directory = Path(config.config_logger_dir)
    directory.mkdir(parents=True, exist_ok=True)
    content = {key: value for key, value in dict_data.items() if key != "self"}
    (directory / f"{name}.rank_{rank}.json").write_text(json.dumps(content, indent=1, default=_describe) + "\n")


def _describe(value: Any) -> Any:
    is_config = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return vars(value) if is_config else str(value)


# ---- groups


def get_pg_size(group: Group | None = None) -> int:
    """Processes of a group; 1 of None, and where there is no torch.distributed."""
    return 1 if group is None or not dist.is_initialized() else group.size()


def get_pg_rank(group: Group | None = None) -> int:
    """This process's place in a group; 0 in None, and where there is no torch.distributed."""
    return 0 if group is None or not dist.is_initialized() else group.rank()


def get_tensor_model_parallel_group_if_none(
    tp_group: Group | None, is_expert: bool = False, check_initialized: bool = True
) -> Group | None:
    """The group itself, or where it is None the current tensor-parallel one, the experts' with is_expert.
    check_initialized: raise RuntimeError where there are no groups yet; else return None."""
    if tp_group is not None or not (check_initialized or ProcessGroupCollection.has_current()):
        return tp_group
    groups = ProcessGroupCollection.current()
    return groups.expt_tp if is_expert else groups.tp


def get_default_pg_collection() -> ProcessGroupCollection:
    """The current groups, for a layer of experts."""
    return ProcessGroupCollection.current()


def ensure_metadata_has_dp_cp_group(metadata: dict[str, Any] | None) -> dict[str, Any]:
    """The dictionary, or a new one, with the current group of replicas under "dp_cp_group" unless one is there."""
    metadata = {} if metadata is None else metadata
    metadata.setdefault("dp_cp_group", ProcessGroupCollection.current().dp_cp)
    return metadata


def create_group(
    ranks: Sequence[int] | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
) -> Any:
    """A new group of these global ranks, of all when None; every process calls it, unless only its members do with
    use_local_synchronization. group_desc: its name in errors."""
    return dist.new_group(
        None if ranks is None else list(ranks), timeout, backend, pg_options, use_local_synchronization, group_desc
    )


class RankGenerator:
    """The ranks of a grid whose axes have these sizes; the first axis of the order runs fastest."""

    def __init__(
        self, tp: int, ep: int, dp: int, pp: int, cp: int, order: str, rank_offset: int = 0, gtp_remat: int = 1
    ) -> None:
        """order: such as "tp-cp-ep-dp-pp"; axes of size 1 may be left out. rank_offset: the first rank. Raises
        ConfigError."""
        if gtp_remat != 1:
            raise ConfigError(f"gtp_remat={gtp_remat} is not supported; leave it at 1")
        if ep > 1 and cp > 1:
            raise ConfigError(f"a grid is of experts (ep={ep}) or of sequences (cp={cp}); make one generator for each")
        self.name_to_size = {"tp": tp, "pp": pp, "dp": dp, "ep": ep, "cp": cp}
        names = order.lower().split("-")
        missing = [name for name, size in self.name_to_size.items() if name not in names]
        too_large = [f"{name}={self.name_to_size[name]}" for name in missing if self.name_to_size[name] > 1]
        unknown = [name for name in names if name not in self.name_to_size]
        if too_large or unknown:
            raise ConfigError(
                f"order {order!r} must name every axis above 1 and no other; {too_large + unknown} differ"
            )
        self.order, self.rank_offset = "-".join(names + missing), rank_offset
        self.world_size = tp * ep * dp * pp * cp

    def get_ranks(self, token: str) -> list[list[int]]:
        """The groups along the axes that the token names, "dp-cp": lists of global ranks."""
        sizes = {name: self.name_to_size[name] for name in self.order.split("-")}
        groups = list_rank_groups(sizes, set(token.split("-")))
        return [[rank + self.rank_offset for rank in group] for group in groups]


def check_param_hashes_across_dp_replicas(model: Iterable[nn.Module], cross_check: bool = False) -> bool:
    """Return whether this process's parameters equal its first replica's bit for bit. cross_check: whether all
    replicas' are; every process then gets the same answer."""
    groups = ProcessGroupCollection.current()
    hashes: dict[bool, dict[str, str]] = {False: {}, True: {}}
    for index, chunk in enumerate(model):
        for name, param in list_parameters(chunk):
            content = param.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
            digest = hashlib.sha256(content).hexdigest()
            hashes[get_placement(param, name).is_expert][f"{index}.{name}"] = digest
    # Experts have other replicas than the rest.
    same = True
    for own, group in ((hashes[False], groups.dp_cp), (hashes[True], groups.expt_dp)):
        same &= own == all_gather_object(own, group)[0]
    return all(all_gather_object(same, groups.dp_cp)) if cross_check else same


# ---- from stage to stage, without a schedule


def recv_from_prev_pipeline_rank_(recv_buffer: Tensor, pp_group: Group | None = None) -> None:
    """Fill the buffer with what the previous stage sends."""
    group = pp_group if pp_group is not None else ProcessGroupCollection.current().pp
    receive(recv_buffer, group, (group.rank() - 1) % group.size()).wait()


def send_to_next_pipeline_rank(tensor: Tensor, pp_group: Group | None = None) -> None:
    """Send to the next stage, which must receive as much."""
    group = pp_group if pp_group is not None else ProcessGroupCollection.current().pp
    send(tensor, group, (group.rank() + 1) % group.size()).wait()


def broadcast_from_last_pipeline_stage(
    size: Sequence[int], dtype: torch.dtype, tensor: Tensor | None = None, pp_group: Group | None = None
) -> Tensor:
    """The last stage's tensor, of this shape and dtype, on all stages. tensor: needed there only."""
    group = pp_group if pp_group is not None else ProcessGroupCollection.current().pp
    last = group.size() - 1
    if group.rank() != last:
        tensor = torch.empty(tuple(size), dtype=dtype, device=current_device())
    assert tensor is not None and tuple(tensor.shape) == tuple(size) and tensor.dtype == dtype, (size, dtype, tensor)
    broadcast(tensor, group, last)
    return tensor

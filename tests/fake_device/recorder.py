# SPDX-License-Identifier: Apache-2.0
"""What a piece of a program asks of the fake device: kernels, waits of the host, copies, memory and collectives.

Imports torch: device.install() comes first.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

# Registers results of torch's collectives that need no other process.
import torch.distributed._tools.fake_collectives
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from megatron.core.kernels import launching
from megatron.training.launch.dry_memo import OperationMemo
from megatron.training.launch.dry_recorder import rms_norm
from tests.fake_device import clock, device

_OURS = f"{Path(__file__).resolve().parents[2]}/megatron/"

# They make or name memory without a kernel, beside the views, which torch itself marks.
NO_KERNELS = frozenset(
    """
    alias as_strided detach device empty empty_like empty_strided is_pinned lift_fresh new_empty new_empty_strided
    record_stream resize_ set_ _unsafe_view _record_function_enter_new _record_function_exit wait_tensor
    """.split()
)
# Their result's size, or the next Python line, depends on values on the device.
WAITING = frozenset("_local_scalar_dense equal is_nonzero masked_select nonzero _unique2".split())


class Recorder(TorchDispatchMode):
    """Sees every operation below autograd, in forward and backward. Enter it inside FakeTensorMode.

    answer: the value that the host reads where it reads one, given the tensor; zeros when it returns None.
    """

    def __init__(self, answer: Callable[[Tensor], Any] = lambda tensor: None) -> None:
        super().__init__()
        self.answer = answer
        self.live_bytes = self.peak_bytes = 0
        self.peak_holders: Counter[str] = Counter()
        """Place in the program -> bytes made there that lived at the peak."""
        self._live: dict[int, tuple[int, str, device.Pool | None]] = {}
        self.kernels: Counter[str] = Counter()
        """Name of the operation -> how often."""
        self.waits: Counter[str] = Counter()
        """Operation and place in the program -> how often the host waited."""
        self.collectives: list[tuple[str, tuple[int, ...], int, str]] = []
        """Operation, ranks, elements, dtype of each, in order; of a transfer the sender and the receiver."""
        self._memo = OperationMemo()
        self.races: list[str] = []
        """Memory that was given back while a copy may still have been reading or writing it, by its place."""
        self._copied_until: dict[int, float] = {}
        self.events: list[str] = []
        """What kernels and collectives there were, in order: "kernel", or the name of the collective."""

    def restart(self) -> None:
        """Count from here."""
        self.kernels.clear()
        self.waits.clear()
        self.collectives.clear()
        self.events.clear()
        device.WAITS.clear()
        device.ORDER.clear()
        device.REPLAYS.clear()
        self._note_peak()

    def find_longest_row(self) -> list[str]:
        """The longest row of collectives that were started without a kernel between them."""
        rows: list[list[str]] = [[]]
        for event in self.events:
            if event == "kernel":
                rows.append([])
            else:
                rows[-1].append(event)
        return max(rows, key=len)

    def count_waits(self) -> Counter[str]:
        """Of operations on tensors, and of streams and events."""
        return self.waits + Counter(device.WAITS)

    def note_wait(self, operation: str) -> None:
        """The host waits for the device here."""
        device.refuse_in_graph(f"{operation} in {find_place()}")
        self.waits[f"{operation} in {find_place()}"] += 1
        device.HOST.seconds = max(device.HOST.seconds, device.find_stream().seconds)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and type(args[0]) is FakeTensor:  # the most frequent of all
            return args[0].fake_device
        kwargs = kwargs or {}
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "c10d":
            return self._take_part(name, func, args, kwargs)
        before = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_device = any(is_on_device(tensor) for tensor in before)
        if name == "_local_scalar_dense":
            return self.read(before[0], "item")
        if name in WAITING and on_device:
            self.note_wait(name)
        if name == "equal":
            return True
        direction = self._note_copy(name, before, args, kwargs)
        if name == "_to_copy" and _leaves_the_host(before, kwargs):
            # Torch has no kernel for it without CUDA, and the values do not matter.
            result = torch.empty(before[0].shape, dtype=kwargs.get("dtype") or before[0].dtype, device=kwargs["device"])
        else:
            result = self._work_out(func, args, kwargs)
        after = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for tensor in after:
            self._remember(tensor)
        if (on_device or any(is_on_device(t) for t in after)) and not func.is_view and name not in NO_KERNELS:
            touched = [*before, *after] if direction is None else [t for t in (*before, *after) if is_on_device(t)][:1]
            self.note_kernel(name, direction, clock.estimate_seconds(name, args, touched, direction))
            if direction is not None:
                self._copied_until[touched[0].untyped_storage()._cdata] = device.find_stream().seconds
        return result

    def _work_out(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operation, which most layers and microbatches repeat."""
        key, tensors = self._memo.find_key(func, args, kwargs)
        known = None if key is None else self._memo.recall(key, tensors)
        if known is not None:
            return known[0]
        result = func(*args, **kwargs)
        if key is not None:
            self._memo.remember(key, tensors, result, 0)
        return result

    def __enter__(self) -> Recorder:
        _active.append(self)
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        _active.remove(self)

    def read(self, tensor: Tensor, operation: str) -> Any:
        """Count a wait of the host, and return what it reads: numbers in lists for a tensor with dimensions."""
        self.note_wait(operation)
        value = self.answer(tensor)
        if value is not None:
            return value
        zero = tensor.dtype == torch.bool or (0.0 if tensor.dtype.is_floating_point else 0)
        for size in reversed(tensor.shape if operation == "tolist" else ()):
            zero = [zero] * size
        return zero

    def count_replays(self) -> tuple[int, int]:
        """Launches of graphs, and the kernels in them."""
        return len(device.REPLAYS), sum(graph.kernels for graph in device.REPLAYS)

    def count_copies(self) -> dict[str, int]:
        """Copies between host and device, and of those to the device that the computation waited for how many had a
        kernel beside them."""
        counted = Counter({"to the host": 0, "to the device": 0, "waited for": 0, "hidden": 0})
        begun: dict[int, int] = {}
        kernels, last = 0, ""
        for what, event in device.ORDER:
            kernels += what == "kernel"
            if what in counted:
                counted[what] += 1
            if what == "recorded" and last == "to the device":
                begun[id(event)] = kernels
            if what == "waited" and id(event) in begun:
                counted["waited for"] += 1
                counted["hidden"] += kernels > begun[id(event)]
            last = what
        return dict(counted)

    def _note_copy(self, name: str, tensors: list[Tensor], args: Any, kwargs: Any) -> str | None:
        """Copies between host and device: their direction. Those that the host waits for are counted."""
        if name == "copy_":
            places = [is_on_device(args[0]), is_on_device(args[1])]
            is_blocking = not kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        elif name == "_to_copy" and kwargs.get("device") is not None:
            places = [torch.device(kwargs["device"]).type == "cuda", is_on_device(args[0])]
            is_blocking = not kwargs.get("non_blocking", False)
        else:
            return None
        if places[0] == places[1]:
            return None
        direction = "to the device" if places[0] else "to the host"
        if is_blocking:
            self.note_wait(f"copy {direction}")
        return direction

    def _take_part(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        group = next(
            (leaf for leaf in tree_leaves((args, kwargs)) if type(leaf).__name__ == "ScriptObject" and _is_group(leaf)),
            None,
        )
        ranks = () if group is None else tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(group)))
        if name in ("send", "recv_"):
            partner = ranks[args[2]]
            own = dist.get_rank()
            ranks = (own, partner) if name == "send" else (partner, own)
        elements = sum(tensor.numel() for tensor in tensors)
        kind = str(tensors[0].dtype) if tensors else ""
        self.note_collective(name, ranks, elements, kind)
        return func(*args, **kwargs)

    def note_kernel(self, name: str, direction: str | None = None, seconds: float = 0.0) -> None:
        """A kernel is launched, or captured; direction: of a copy between host and device."""
        device.find_stream().run(seconds, clock.ROW.launch_seconds)
        if device.CAPTURING:
            device.CAPTURING[-1].kernels += 1
            return
        self.kernels[name] += 1
        self.events.append("kernel")
        device.ORDER.append((direction or "kernel", None))

    def note_collective(self, name: str, ranks: Sequence[int], elements: int = 0, kind: str = "") -> None:
        """A communication of these ranks begins."""
        if device.CAPTURING:
            return
        self.collectives.append((name, tuple(ranks), elements, kind))
        self.events.append(name)

    def _remember(self, tensor: Tensor) -> None:
        """Count the tensor's memory until nothing uses it."""
        # A DTensor has the size of the whole and no memory of its own; its shard is counted.
        if not is_on_device(tensor) or isinstance(tensor, DTensor):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        # Small ones are many, and do not matter.
        place = find_place() if storage.nbytes() >= 1 << 20 else "less than a MiB each"
        pool = device.CAPTURING[-1].pool if device.CAPTURING else None
        self._live[key] = storage.nbytes(), place, pool
        self._add(storage.nbytes(), pool)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        size, place, pool = self._live.pop(key, (0, "", None))
        # Whoever gets it writes in the computation's stream, after what that waits for.
        if self._copied_until.pop(key, 0.0) > max(device.COMPUTATION.seconds, device.HOST.seconds):
            self.races.append(place)
        self._add(-size, pool)

    def _add(self, size: int, pool: device.Pool | None) -> None:
        if pool is not None:
            pool.live_bytes += size
            size = max(0, pool.live_bytes - pool.most_bytes)
            pool.most_bytes += size
        self.live_bytes += size
        if self.live_bytes > self.peak_bytes:
            self._note_peak()

    def note_size(self, storage: torch.UntypedStorage) -> None:
        """A piece of memory has another size now: FSDP frees and takes what it gathers so, without an operation."""
        if storage._cdata not in self._live:
            return
        before, place, pool = self._live[storage._cdata]
        self._live[storage._cdata] = storage.nbytes(), place, pool
        self._add(storage.nbytes() - before, pool)

    def _note_peak(self) -> None:
        self.peak_bytes = self.live_bytes
        self.peak_holders = Counter()
        pools = set()
        for size, place, pool in self._live.values():
            if pool is None:
                self.peak_holders[place] += size
            else:
                pools.add(pool)
        if pools:
            self.peak_holders["pools of graphs"] = sum(pool.most_bytes for pool in pools)


def _is_group(leaf: Any) -> bool:
    return bool(leaf._type().qualified_name().endswith("ProcessGroup"))


def _leaves_the_host(tensors: list[Tensor], kwargs: Any) -> bool:
    target = kwargs.get("device")
    return target is not None and torch.device(target).type == "cuda" and not is_on_device(tensors[0])


def is_on_device(tensor: Tensor) -> bool:
    """Whether the fake GPU has it."""
    return tensor.device.type == "cuda"


def find_place() -> str:
    """The nearest function of ours: `file:function`."""
    # The stack is walked by hand: the traceback module would read the source of every frame.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_OURS):
            return f"{file[len(_OURS) - len('megatron/') :]}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"


# ---- what a CPU build of torch would take apart


def _attend(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """The flash kernel where it takes such operands, else the efficient one, else elementary operations."""
    is_square = not is_causal or query.shape[-2] == key.shape[-2]
    if attn_mask is None and query.element_size() == 2 and query.shape[-1] == value.shape[-1] and is_square:
        result: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
        return result
    if enable_gqa and query.shape[1] != key.shape[1]:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    bias = None
    if attn_mask is not None:
        bias = torch.zeros(attn_mask.shape, dtype=query.dtype, device=query.device).masked_fill(~attn_mask, -1e9)
        bias = bias.expand(*query.shape[:2], query.shape[2], key.shape[2])
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, True, dropout_p, is_causal, scale=scale
    )[0]


_torch_tolist = FakeTensor.tolist


def _tolist(tensor: Tensor) -> Any:
    """On the device: one wait, and what the recorder answers, or zeros."""
    if _active and is_on_device(tensor):
        return _active[-1].read(tensor, "tolist")
    return _torch_tolist(tensor)


def _take_out_dtype(add_product: Callable[..., Any]) -> Callable[..., Any]:
    """How shape and dtype of `addmm` follow, for operands whose product is wanted in a wider dtype."""

    @functools.wraps(add_product)
    def add_wide_product(into: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, **options: Any) -> Any:
        return add_product(into, a.to(out_dtype), b.to(out_dtype), **options)

    return add_wide_product


def _correct_wide_sums() -> None:
    """Torch 2.11 takes the out_dtype of `addmm` for its factor beta where tensors are fake, and fails; its CUDA kernel
    does not. Later releases say how to do it."""
    table = torch._decomp.decomposition_table
    overloads = torch.ops.aten.addmm
    for name in {"dtype", "dtype_out"} & set(overloads.overloads()):
        wide = getattr(overloads, name)
        if table.get(wide) is table[overloads.default]:
            table[wide] = _take_out_dtype(table[wide])


_active: list[Recorder] = []


def _make_tensor(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch.tensor or torch.as_tensor: of Python's numbers it makes a tensor on the host, and waits for its copy."""

    def copy_numbers(data: Any, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> Tensor:
        target = torch.device(device) if device is not None else torch.get_default_device()
        if isinstance(data, Tensor) or target.type != "cuda":
            return make(data, dtype=dtype, device=device, **options)
        if _active:
            _active[-1].note_wait("copy to the device")
        on_host = make(data, dtype=dtype, device="cpu")
        return torch.empty(on_host.shape, dtype=on_host.dtype, device=target)

    return copy_numbers


def _note_resizing(resize: Callable[..., Any]) -> Callable[..., Any]:
    def resize_and_note(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        if _active:
            _active[-1].note_size(storage)
        return result

    return resize_and_note


def _find_address(find: Callable[[torch.UntypedStorage], int]) -> Callable[[torch.UntypedStorage], int]:
    """Memory without values lies nowhere; a number for each piece tells them apart as addresses do."""
    return lambda storage: storage._cdata if storage.device.type == "meta" else find(storage)


def _all_gather_object(values: list[Any], value: Any, group: Any = None) -> None:
    """Every other rank has what this one has."""
    _active[-1].note_collective("all_gather_object", dist.get_process_group_ranks(group))
    values[:] = [value] * len(values)


def _broadcast_object_list(values: list[Any], src: Any = None, group: Any = None, **options: Any) -> None:
    """The source has what this rank has; where that is nothing, the names of the losses, which the last stage tells."""
    values[:] = [value or ["lm loss"] for value in values]
    _active[-1].note_collective("broadcast_object_list", dist.get_process_group_ranks(group))


def _launch_kernel(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """A kernel of ours counts as one, by its name; its results are there, without values, before it begins."""
    if _active and 0 not in grid:
        seconds = clock.count_seconds([argument for argument in arguments if isinstance(argument, Tensor)])
        _active[-1].note_kernel(kernel.__name__, seconds=seconds)


@functools.cache
def replace_operations() -> None:
    """From now on torch's composite operations are those of a CUDA build, and objects come from ranks like this one."""
    from_group = DeviceMesh.from_group

    def build_mesh(*arguments: Any, **options: Any) -> DeviceMesh:
        """A mesh is numbers of ranks, which are read."""
        with _disable_current_modes():
            return from_group(*arguments, **options)

    DeviceMesh.from_group = build_mesh  # type: ignore[method-assign]
    dist.all_gather_object = _all_gather_object
    dist.broadcast_object_list = _broadcast_object_list
    launching.launch = _launch_kernel
    _correct_wide_sums()
    F.rms_norm = rms_norm
    F.scaled_dot_product_attention = _attend
    FakeTensor.tolist = _tolist  # type: ignore[method-assign]
    torch.UntypedStorage.data_ptr = _find_address(torch.UntypedStorage.data_ptr)  # type: ignore[method-assign]
    torch.UntypedStorage.resize_ = _note_resizing(torch.UntypedStorage.resize_)  # type: ignore[method-assign]
    torch.tensor = _make_tensor(torch.tensor)
    torch.as_tensor = _make_tensor(torch.as_tensor)

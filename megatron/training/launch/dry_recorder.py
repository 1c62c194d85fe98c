# SPDX-License-Identifier: Apache-2.0
"""Record of what a piece of a program asks of a device that does nothing: memory, products, kernels and collectives.

Tensors are torch's fake ones, which have shapes and no values; collectives go to torch's fake process group, which
answers at once. `ready()` puts stand-ins for what would need another process, and takes them away again.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# Registers results of torch's collectives that need no other process.
import torch.distributed._tools.fake_collectives
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from megatron.core.kernels import launching
from megatron.core.ssm import by_tokens, convolution, linear_attention
from megatron.core.tensor_parallel import cross_entropy, parameters, products
from megatron.core.transformer import norms
from megatron.core.transformer.core_attention import block_kernels, select
from megatron.core.transformer.core_attention.block_kernels import CPUFlashKernel, Gradients, Rule
from megatron.core.transformer.moe import grouped_products, permutation
from megatron.training.launch.dry_memo import OperationMemo

_OURS = f"{Path(__file__).resolve().parents[2]}/"
# Besides views, which torch itself marks, these make or name memory without a kernel.
_NO_KERNELS = frozenset(
    """alias as_strided detach empty empty_like empty_strided lift_fresh new_empty new_empty_strided resize_ set_
    _unsafe_view wait_tensor""".split()
)
_ASK_WHERE = (
    products, cross_entropy, norms, launching, permutation, by_tokens, convolution, linear_attention,
)  # fmt: skip
"""Modules that ask what they compute on, and take and leave other memory in the kernels of a GPU."""
_ATTENTION = {
    "_scaled_dot_product_flash_attention_for_cpu": 0, "_scaled_dot_product_flash_attention_for_cpu_backward": 1,
}  # fmt: skip
"""Torch counts the products of the attention kernels of GPUs; these are the same on the CPU."""


class RecordedCall(NamedTuple):
    """A collective, or one side of a transfer."""

    op: str
    ranks: tuple[int, ...]
    """Of the group; of a transfer the sender and the receiver."""
    bytes: int
    place: str
    """Place in the program, as file:line."""

    @property
    def is_transfer(self) -> bool:
        """True if it goes from one rank to another."""
        return self.op in ("send", "recv")


class DryRecorder(TorchDispatchMode):
    """Sees every operation below autograd, in forward and backward. Enter it inside FakeTensorMode.

    answer: the value that the host reads where it reads one, given the tensor; zeros where it returns None. memo: what
    recorders before it have learnt.
    """

    def __init__(self, answer: Callable[[Tensor], Any], memo: OperationMemo | None = None) -> None:
        super().__init__()
        self.answer = answer
        self.live_bytes = self.peak_bytes = 0
        self.flops = self.kernels = 0
        self.calls: list[RecordedCall] = []
        self._live: dict[int, int] = {}
        self._memo = memo or OperationMemo()
        self._handles: dict[Any, Any] = {}
        """Collective -> what its caller waits for; it has ended before it began, and serves again."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here, and to make sure of it takes longer than most operations.
        return False

    def restart(self) -> None:
        """Count from here; what lives goes on living."""
        self.peak_bytes, self.flops, self.kernels = self.live_bytes, 0, 0
        self.calls.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # the most frequent of all
            return args[0].fake_device
        kwargs = kwargs or {}
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "c10d":
            self._note_collective(name, args, kwargs)
            return self._begin(func, args, kwargs)
        if name == "_local_scalar_dense":
            return self.read(args[0], False)
        if name == "equal":
            return True
        key, tensors = self._memo.find_key(func, args, kwargs)
        known = None if key is None else self._memo.recall(key, tensors)
        if known is None:
            result = func(*args, **kwargs)
            flops = count_flops(func, name, args, kwargs, result)
            if key is not None:
                self._memo.remember(key, tensors, result, flops)
        else:
            result, flops = known
        if not func.is_view and name not in _NO_KERNELS:
            self.kernels += 1
        self.flops += flops
        for leaf in [result] if type(result) is FakeTensor else tree_leaves(result):
            if isinstance(leaf, FakeTensor):
                self._remember(leaf)
        return result

    def read(self, tensor: Tensor, as_list: bool) -> Any:
        """Return what the host reads: the answer, or zeros, in lists for a tensor with dimensions."""
        value = self.answer(tensor)
        if value is not None:
            return value
        zero: Any = False if tensor.dtype == torch.bool else 0.0 if tensor.dtype.is_floating_point else 0
        for size in reversed(tensor.shape if as_list else ()):
            zero = [zero] * size
        return zero

    def note(self, op: str, ranks: tuple[int, ...], size: int) -> None:
        """A communication of these ranks begins."""
        self.calls.append(RecordedCall(op, ranks, size, find_place()))

    def _note_collective(self, name: str, args: Any, kwargs: Any) -> None:
        leaves = tree_leaves((args, kwargs))
        group = next(leaf for leaf in leaves if type(leaf).__name__ == "ScriptObject" and _is_group(leaf))
        ranks = tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(group)))
        if name in ("send", "recv_"):
            own, partner = dist.get_rank(), ranks[args[2]]
            ranks = (own, partner) if name == "send" else (partner, own)
        sizes = [leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, Tensor)]
        self.note(name.strip("_"), ranks, sum(sizes))

    def _begin(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what a collective returns: a handle, only or after the tensors that it fills, its first operand."""
        handle = self._handles.get(func)
        if handle is not None:
            return handle if len(func._schema.returns) == 1 else (args[0], handle)
        result = func(*args, **kwargs)
        if len(func._schema.returns) == 1:
            self._handles[func] = result
        elif len(result) == 2 and args and type(args[0]) is type(result[0]):
            self._handles[func] = result[1]
        return result

    def _remember(self, tensor: Tensor) -> None:
        """Count the tensor's memory until nothing uses it."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        self._live[key] = storage.nbytes()
        self.live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.live_bytes -= self._live.pop(key, 0)


def count_flops(func: Any, name: str, args: Any, kwargs: Any, result: Any) -> int:
    """Multiplications and additions of matrix products and attention; 0 for every other operation. Attention counts
    the full square, whether it is causal or not, as torch does."""
    if name in _ATTENTION:
        shapes = [args[index].shape for index in range(3 + _ATTENTION[name])]
        return int(sdpa_backward_flop_count(*shapes) if _ATTENTION[name] else sdpa_flop_count(*shapes))
    if name in ("mm", "addmm", "bmm"):
        # With a wider dtype of the result there are more operands, which torch's formulas do not know.
        args, kwargs = [operand for operand in args if isinstance(operand, Tensor)], {}
    count = flop_registry.get(func._overloadpacket)
    return 0 if count is None else int(count(*args, **kwargs, out_val=result))


def find_place() -> str:
    """Return the nearest line that is not this file's or torch's: a user's program, or this one's call of a
    collective."""
    # The stack is walked by hand: the traceback module would read the source of every frame.
    frame: FrameType | None = sys._getframe(1)
    inner = "elsewhere"
    while frame is not None:
        file = frame.f_code.co_filename
        if "/torch/" not in file and file != __file__ and not file.endswith("core/collectives.py"):
            return f"{file.removeprefix(_OURS)}:{frame.f_lineno}"
        frame = frame.f_back
    return inner


class _RMSNorm(torch.autograd.Function):
    """One kernel forward and one backward, which keeps a number for each row, as torch's CUDA kernels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        rows = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, rows)
        return torch.relu(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        return torch.relu(grads[0]), None if weight is None else torch.empty_like(weight)


def rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Stand in for torch's kernel, which a CPU build would take apart: its shapes and memory, without its values."""
    result: Tensor = _RMSNorm.apply(x, weight)
    return result


class _FilledUp(CPUFlashKernel):
    """The CPU's flash kernel, whose operands are filled up to one width, as the kernels of GPUs want them."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
        """See BlockKernel."""
        width, widest = v.shape[-1], max(k.shape[-1], v.shape[-1])
        out, log_sum = super().forward(_fill_up(q, widest), _fill_up(k, widest), _fill_up(v, widest), rule)
        return out[..., :width], log_sum

    def backward(
        self, grad: Tensor, inputs: tuple[Tensor, Tensor, Tensor], merged: tuple[Tensor, Tensor], rule: Rule
    ) -> Gradients:
        """See BlockKernel."""
        (q, k, v), (out, log_sum) = inputs, merged
        widest = max(k.shape[-1], v.shape[-1])
        grad, out, *filled = (_fill_up(x, widest) for x in (grad, out, q, k, v))
        found = super().backward(grad, tuple(filled), (out, log_sum), rule)  # type: ignore[arg-type]
        return tuple(x[..., : of.shape[-1]] for x, of in zip(found, inputs, strict=True))  # type: ignore[return-value]


def _fill_up(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _is_never_cpu(place: Any) -> bool:
    return False


def _is_no_tensor(place: Any) -> bool:
    """The kernel of blocks is the CPU's, and products are a GPU's."""
    return not isinstance(place, Tensor)


def _is_group(leaf: Any) -> bool:
    return bool(leaf._type().qualified_name().endswith("ProcessGroup"))


@contextlib.contextmanager
def ready(recorder: DryRecorder) -> Iterator[None]:
    """Inside, tensors are fake, and objects come from ranks like this one."""

    def all_gather_object(values: list[Any], value: Any, group: Any = None) -> None:
        recorder.note("all_gather_object", tuple(dist.get_process_group_ranks(group or dist.group.WORLD)), 0)
        values[:] = [value] * len(values)

    def broadcast_object_list(values: list[Any], src: Any = None, group: Any = None, **options: Any) -> None:
        # Where the source has something and this rank nothing, it is the names of the losses.
        values[:] = [value or ["lm loss"] for value in values]
        recorder.note("broadcast_object_list", tuple(dist.get_process_group_ranks(group or dist.group.WORLD)), 0)

    def find_address(storage: torch.UntypedStorage) -> int:
        # Memory without values has no address; a number for each piece tells them apart instead.
        return storage._cdata

    def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        # Its results are there, without values, before it begins.
        recorder.kernels += 0 not in grid

    attend_exactly = F.scaled_dot_product_attention

    def attend(*operands: Any, dropout_p: float = 0.0, **options: Any) -> Tensor:
        # With dropout the CPU stores all scores, and the kernels of GPUs the state of a generator.
        return attend_exactly(*operands, **options)

    def drop(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        # One byte an element says what a GPU's kernel has dropped; the CPU keeps the factors themselves.
        return torch.native_dropout(x, p, True)[0] if training and p > 0.0 else x

    def draw(*arguments: Any) -> None:
        # A start for each expert of each layer, of which nothing would be left.
        return None

    stand_ins: list[tuple[Any, str, Any]] = [
        (dist, "all_gather_object", all_gather_object), (dist, "broadcast_object_list", broadcast_object_list),
        (FakeTensor, "tolist", lambda tensor: recorder.read(tensor, True)),
        (torch.UntypedStorage, "data_ptr", find_address), (F, "rms_norm", rms_norm),
        (F, "scaled_dot_product_attention", attend), (F, "dropout", drop),
        *((module, "is_cpu", _is_never_cpu) for module in _ASK_WHERE), (launching, "launch", launch),
        (parameters, "draw_values", draw), (select, "CPUFlashKernel", _FilledUp),
        (block_kernels, "is_cpu", _is_no_tensor), (products, "has_wide_sums", lambda device, dtype: True),
        (launching, "kernels_work", lambda device: importlib.util.find_spec("triton") is not None),
        (grouped_products, "grouped_mm_works", lambda widths, dtype, device: dtype == torch.bfloat16),
    ]  # fmt: skip
    before = [getattr(owner, name) for owner, name, _ in stand_ins]
    try:
        for owner, name, stand_in in stand_ins:
            setattr(owner, name, stand_in)
        with FakeTensorMode(allow_non_fake_inputs=True), recorder:
            yield
    finally:
        for (owner, name, _), original in zip(stand_ins, before, strict=True):
            setattr(owner, name, original)

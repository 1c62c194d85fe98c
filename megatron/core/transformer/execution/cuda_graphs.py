# SPDX-License-Identifier: Apache-2.0
"""Layers whose forward and backward are recorded once, and then launched as two CUDA graphs each.

A layer of a small model, or of one divided over many GPUs, takes longer to launch than to compute. Replaying what it
launched the first time takes one call.

    Passes        the layers of one chunk of the model: when they are recorded, and which recordings a pass uses
    Part          what is recorded of a layer: all of it; its attention, or its dense MLP, with norm and residual;
                  or the norm and the router before its experts
    _Slot         the recordings of all parts for one micro-batch in flight, in one pool of memory

The first steps (--cuda-graph-warmup-steps) run as ever. They tell which tensors the parts pass on, and how many
micro-batches are in flight at once. At the end of the last of them, when nothing travels between ranks, as many slots
are recorded: every part's forward in the order of the layers, every part's backward in the opposite order, which is the
order in which each pass will replay them. A micro-batch holds its slot from its forward until its backward has come
through the first part, so that memory that is used again within a slot is never used by two micro-batches at once. One
that finds no free slot runs without, and has one more recorded at the end of the step.

What is recorded: kernels, collectives of tensor parallelism, weight gradients added to `main_grad`, the random numbers
of dropout (the generator of the device moves on with each replay as the kernels would have moved it), recomputation.
What stays outside: the wait for gathered parameters (a hook of the layer), the reports of finished gradients (hooks of
the parameters: autograd calls them after the replay), the random stream of the layers, masks and angles, which are
copied to fixed addresses once for each pass where they have changed.

A pass runs without graphs where it is not like the recorded ones: in evaluation and generation, with packed documents,
with tensors of other shapes, and while a hook watches a module inside a part (activation statistics, dumps). So does a
step before which parameters were put elsewhere in memory; at its end they are recorded again.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.device_graphs import (
    Recorder,
    Recording,
    are_same,
    copy_structure,
    list_tensors,
    load,
    renew_gradient_nodes,
)
from megatron.core.stacked_parameters import list_parameters

Tensors = tuple[Tensor, ...]
Function = Callable[..., Tensor | Tensors]


def record_layers(model: nn.Module, recorder: Recorder) -> None:
    """Let the layers of a model whose config asks for graphs be recorded, each block's after its warm-up steps."""
    for module in model.modules():
        if hasattr(type(module), "record_layers"):
            module.record_layers(recorder)  # type: ignore[operator]


def forget_recordings(model: nn.Module) -> None:
    """Free them: a communicator can only be closed when no graph holds it."""
    for module in model.modules():
        if hasattr(type(module), "record_layers") and module.passes is not None:
            module.passes.forget()  # type: ignore[union-attr,operator]


class Region:
    """A part of a layer, called with the function that computes it.

    modules: those that the function calls, and whose parameters it uses.
    """

    def __init__(self, passes: Passes, modules: Sequence[nn.Module]) -> None:
        self._passes = passes
        self.modules = list(modules)
        self._routers: list[Any] = [module for module in modules if hasattr(module, "route_log")]
        self._inner = list(dict.fromkeys(itertools.chain.from_iterable(module.modules() for module in modules)))

    def __call__(
        self, function: Function, inputs: Tensors, constants: Sequence[Any] = (), *, recorded: Function | None = None
    ) -> Any:
        """function(*inputs, *constants), a tensor or several, by the recordings where the pass has some.

        constants: of those that the pass was opened with. recorded: what is recorded instead of the function, with the
        same values and gradients.
        """
        current = self._passes.current
        if current is None:
            return function(*inputs, *constants)
        return current.run(self, function if recorded is None else recorded, function, inputs, constants)

    def list_parameters(self) -> list[nn.Parameter]:
        """The parameters that get gradients, each once."""
        return list(dict.fromkeys(p for module in self.modules for _, p in list_parameters(module) if p.requires_grad))

    def is_watched(self) -> bool:
        """Return whether a hook reads, or changes, what goes through a module inside, or a log a router's choices."""
        return any(
            m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks for m in self._inner
        ) or any(router.route_log is not None for router in self._routers)


class Passes:
    """The passes through the layers of one chunk.

    warmup_steps: training steps that run without graphs; one at least, in which libraries and kernels are loaded.
    """

    def __init__(self, recorder: Recorder, warmup_steps: int) -> None:
        self.current: _LearningPass | _ReplayedPass | None = None
        self._recorder = recorder
        self._warmup_steps = max(1, warmup_steps)
        self._steps = 0
        self._parts: list[Region] = []
        self._slots: list[_Slot] = []
        self._learned: _LearningPass | None = None
        self._leases: list[weakref.ref[_Lease]] = []
        self._most_in_flight = 0
        self._is_checked = False

    @property
    def is_replaying(self) -> bool:
        """True if the pass that is under way replays recordings."""
        return isinstance(self.current, _ReplayedPass)

    @property
    def slots(self) -> int:
        """Micro-batches for which recordings were made."""
        return len(self._slots)

    def add(self, *modules: nn.Module) -> Region:
        """Return a new part of these modules; parts are added in any order."""
        self._parts.append(Region(self, modules))
        return self._parts[-1]

    def finish_step(self) -> None:
        """End a training step: nothing is on its way between ranks. Behind the warm-up, record what was missing."""
        self._steps, self._is_checked = self._steps + 1, False
        missing = self._most_in_flight - len(self._slots)
        if self._steps < self._warmup_steps or self._learned is None or missing <= 0:
            return
        with self._recorder.session():
            self._slots += [_Slot(self._recorder, self._learned) for _ in range(missing)]

    def forget(self) -> None:
        """Free all recordings; the passes that follow run without."""
        self._parts, self._slots, self._leases, self._learned = [], [], [], None
        self._warmup_steps = sys.maxsize

    @contextlib.contextmanager
    def open(self, hidden_states: Tensor, constants: Sequence[Any]) -> Iterator[Sequence[Any]]:
        """One forward pass of training through the layers, which the block does; it yields what stands for the
        constants there.

        constants: what the layers read in addition to hidden states and has no gradient: masks and angles, as tensors,
        named tuples of tensors, or None.
        """
        self.current = self._choose(hidden_states, constants)
        try:
            yield constants if self.current is None else self.current.constants
            # Only now: a pass that an error has ended has not seen every part.
            if isinstance(self.current, _LearningPass):
                self._learned = self.current
                self.current.end()
        finally:
            self.current = None

    def _choose(self, hidden_states: Tensor, constants: Sequence[Any]) -> _LearningPass | _ReplayedPass | None:
        if any(part.is_watched() for part in self._parts):
            return None
        kind = describe((hidden_states, *constants))
        if self._steps >= self._warmup_steps and self._learned is not None and kind != self._learned.kind:
            return None
        if not self._is_checked:
            # Once in a step. What has been moved meanwhile is recorded again at its end.
            self._slots, self._is_checked = [slot for slot in self._slots if slot.is_current()], True
        lease = _Lease()
        in_flight = [known for known in self._leases if not _is_over(known)]
        self._leases = [*in_flight, weakref.ref(lease)]
        self._most_in_flight = max(self._most_in_flight, len(self._leases))
        slot = next((slot for slot in self._slots if slot.is_free), None)
        return _LearningPass(kind, constants, lease) if slot is None else slot.begin(constants, lease)


def describe(value: Any) -> Any:
    """Return what must be the same for recordings to serve: shapes and dtypes of tensors, other values themselves."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad
    return tuple(map(describe, value)) if isinstance(value, tuple) else value


# ---- a pass without graphs, which tells what to record


@dataclass
class _Like:
    """A tensor without its memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    made_by: tuple[int, int] | None = None
    """The call of the same pass, and the place among its outputs, that this tensor comes from as it is."""

    def make(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device).zero_()


@dataclass
class _LearnedCall:
    """Form in which a part is called in every pass."""

    part: Region
    function: Function
    inputs: list[_Like]
    constants: list[int | None]
    """Constants of the pass that it reads, by their place; None for none."""


class _LearningPass:
    """A pass that runs without graphs and notes the calls of its parts."""

    def __init__(self, kind: Any, constants: Sequence[Any], lease: _Lease) -> None:
        self.kind, self.constants = kind, constants
        self.calls: list[_LearnedCall] = []
        self._lease: _Lease | None = lease
        self._made: list[tuple[weakref.ref[Tensor], tuple[int, int]]] = []

    def run(self, part: Region, recorded: Function, live: Function, inputs: Tensors, constants: Sequence[Any]) -> Any:
        outputs = live(*inputs, *constants)
        places = [self._find_constant(constant) for constant in constants]
        likes = [self._liken(tensor) for tensor in inputs]
        number = len(self.calls)
        self.calls.append(_LearnedCall(part, recorded, likes, places))
        for index, output in enumerate(outputs if isinstance(outputs, tuple) else (outputs,)):
            self._made.append((weakref.ref(output), (number, index)))
            if number == index == 0 and output.requires_grad and self._lease is not None:
                self._lease.end_with(output)
        return outputs

    def end(self) -> None:
        """Keep what was noted; the micro-batch lives on only in its graph."""
        self._made, self._lease = [], None

    def _liken(self, tensor: Tensor) -> _Like:
        made_by = next((place for made, place in self._made if made() is tensor), None)
        layout = tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device
        return _Like(*layout, tensor.requires_grad, made_by)

    def _find_constant(self, constant: Any) -> int | None:
        if constant is None:
            return None
        places = [place for place, known in enumerate(self.constants) if known is constant]
        assert places, f"a recorded part reads {type(constant).__name__}, which its pass was not opened with"
        return places[0]


# ---- recordings


@dataclass(eq=False)
class _RecordedCall:
    """The recordings of one part, and the tensors at their fixed addresses."""

    call: _LearnedCall
    parameters: list[nn.Parameter]
    inputs: list[Tensor]
    forward: Recording[Any]
    outputs: list[Tensor]
    returns_several: bool
    backward: Recording[Any] | None = None
    output_grads: list[Tensor | None] = field(default_factory=list)
    """None for an output that has no gradient, such as numbers of experts."""
    input_grads: list[Tensor | None] = field(default_factory=list)
    parameter_grads: list[Tensor | None] = field(default_factory=list)
    """None for a parameter whose gradient the recording itself adds to its main_grad."""


class _Slot:
    """Recordings of every part for one micro-batch in flight."""

    def __init__(self, recorder: Recorder, learned: _LearningPass) -> None:
        calls, constants = learned.calls, learned.constants
        self._recorder, self._pool = recorder, recorder.open_pool()
        self.constants = tuple(map(copy_structure, constants))
        self._fixed = list_tensors(self.constants)
        # What the fixed tensors hold a copy of: kept, so that its address is not given to other values.
        self._loaded = [(tensor, tensor._version) for tensor in list_tensors(constants)]
        self._lease: weakref.ref[_Lease] | None = None
        self.calls: list[_RecordedCall] = []
        renew_gradient_nodes(parameter for call in calls for parameter in call.part.list_parameters())
        graphs = [self._record_forward(call) for call in calls]
        for number in reversed(range(len(calls))):
            # Popped: what forward has kept for backward is free for the recordings that come after it.
            self._record_backward(number, *graphs.pop())
        # Views, which keep the memory: nothing else can come to lie there.
        self._memory = [tensor.detach() for tensor in self._list_memory()]

    @property
    def is_free(self) -> bool:
        """True if no micro-batch holds it."""
        return self._lease is None or _is_over(self._lease)

    def is_current(self) -> bool:
        """Return whether parameters and their gradients lie where they were recorded."""
        return all(map(are_same, self._memory, self._list_memory()))

    def _list_memory(self) -> list[Tensor]:
        parameters = [parameter for call in self.calls for parameter in call.parameters]
        return [*parameters, *(getattr(parameter, "main_grad", parameter) for parameter in parameters)]

    def begin(self, constants: Sequence[Any], lease: _Lease) -> _ReplayedPass:
        """A micro-batch's pass."""
        for place, (fixed, tensor) in enumerate(zip(self._fixed, list_tensors(constants), strict=True)):
            loaded, version = self._loaded[place]
            if not are_same(tensor, loaded) or tensor._version != version:
                fixed.copy_(tensor)
                self._loaded[place] = tensor, tensor._version
        self._lease = weakref.ref(lease)
        return _ReplayedPass(self, lease)

    def _choose_address(self, like: _Like) -> Tensor:
        """Return where a part reads an input: where an earlier part has written it, or in separate memory."""
        if like.made_by is None:
            return like.make()
        call, index = like.made_by
        return self.calls[call].outputs[index].detach()

    def _record_forward(self, call: _LearnedCall) -> tuple[list[Tensor], list[Tensor]]:
        leaves = [self._choose_address(like).requires_grad_(like.requires_grad) for like in call.inputs]
        constants = [None if place is None else self.constants[place] for place in call.constants]

        def forward() -> Any:
            with torch.enable_grad():
                return call.function(*leaves, *constants)

        recording = self._recorder.record(forward, self._pool)
        returned, recording.result = recording.result, None
        outputs = list(returned) if isinstance(returned, tuple) else [returned]
        self.calls.append(
            _RecordedCall(
                call,
                call.part.list_parameters(),
                [leaf.detach() for leaf in leaves],
                recording,
                [output.detach() for output in outputs],
                returns_several=isinstance(returned, tuple),
            )
        )
        return leaves, outputs

    def _record_backward(self, number: int, leaves: list[Tensor], outputs: list[Tensor]) -> None:
        recorded = self.calls[number]
        recorded.output_grads = [
            self._choose_gradient_address(number, index, output) if output.requires_grad else None
            for index, output in enumerate(outputs)
        ]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        roots = [output for output in outputs if output.requires_grad]
        starts = [grad for grad in recorded.output_grads if grad is not None]

        def backward() -> list[Tensor | None]:
            # Parameters are asked for, too: a product that adds to main_grad returns nothing for its weight, but is
            # not run for a weight that nobody asks for.
            grads = torch.autograd.grad(roots, [*wanted, *recorded.parameters], starts, allow_unused=True)
            of_parameters = map(_add_to_main_grad, recorded.parameters, grads[len(wanted) :])
            return [*grads[: len(wanted)], *of_parameters]

        recorded.backward = self._recorder.record(backward, self._pool)
        grads, recorded.backward.result = recorded.backward.result, None
        of_inputs = iter(grads[: len(wanted)])
        recorded.input_grads = [next(of_inputs) if leaf.requires_grad else None for leaf in leaves]
        recorded.parameter_grads = grads[len(wanted) :]

    def _choose_gradient_address(self, number: int, index: int, output: Tensor) -> Tensor:
        """Return where a part's backward reads the gradient of an output: where a later part has written it, or in
        separate memory."""
        for later in self.calls[number + 1 :]:
            for like, grad in zip(later.call.inputs, later.input_grads, strict=True):
                if like.made_by == (number, index) and grad is not None and grad.stride() == output.stride():
                    return grad.detach()
        return torch.zeros_like(output)


def _add_to_main_grad(parameter: nn.Parameter, grad: Tensor | None) -> Tensor | None:
    """Return what is left to be handed to autograd."""
    main_grad: Tensor | None = getattr(parameter, "main_grad", None)
    if grad is None or main_grad is None:
        return grad
    main_grad.add_(grad)
    return None


# ---- a pass by recordings


class _Lease:
    """A micro-batch in flight: until the backward of every part that it has run, or until its graph is gone."""

    def __init__(self) -> None:
        self._waiting = 0
        self.is_over = False

    def begin_part(self) -> None:
        self._waiting += 1

    def end_part(self) -> None:
        self._waiting -= 1
        self.is_over = self._waiting == 0

    def end_with(self, output: Tensor) -> None:
        """Be over when the gradient of the first part's output is there; held by its graph until then."""

        def end(grad: Tensor) -> None:
            self.is_over = True

        output.register_hook(end)


def _is_over(lease: weakref.ref[_Lease]) -> bool:
    known = lease()
    return known is None or known.is_over


class _ReplayedPass:
    """A pass by the recordings of a slot."""

    def __init__(self, slot: _Slot, lease: _Lease) -> None:
        self.constants, self._lease = slot.constants, lease
        self._calls = enumerate(slot.calls)

    def run(self, part: Region, recorded: Function, live: Function, inputs: Tensors, constants: Sequence[Any]) -> Any:
        number, call = next(self._calls)
        assert call.call.part is part, f"call {number} of a recorded pass was another part's"
        outputs: Tensors = _Replay.apply(call, number == 0, self._lease, *inputs, *call.parameters)
        return outputs if call.returns_several else outputs[0]


class _Replay(torch.autograd.Function):
    """A part's recordings as one operation of autograd; the parameters are inputs so that their hooks are called."""

    @staticmethod
    def forward(ctx: Any, call: _RecordedCall, is_first: bool, lease: _Lease, *tensors: Tensor) -> Tensors:
        for fixed, tensor, like in zip(call.inputs, tensors, call.call.inputs, strict=False):
            if like.made_by is not None and not are_same(tensor, fixed):
                raise RuntimeError(
                    f"a hook has replaced the hidden states {list(tensor.shape)} between two recorded layers; give "
                    "--cuda-graph-impl none"
                )
            load(fixed, tensor)
        call.forward.replay()
        ctx.call, ctx.is_first, ctx.lease = call, is_first, lease
        ctx.set_materialize_grads(False)
        lease.begin_part()
        outputs = tuple(output.detach() for output in call.outputs)
        ctx.mark_non_differentiable(
            *(output for output, grad in zip(outputs, call.output_grads, strict=True) if grad is None)
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        call: _RecordedCall = ctx.call
        if ctx.lease.is_over:
            raise RuntimeError(
                "backward went through recorded layers a second time; what they kept belongs to another micro-batch "
                "by now: leave retain_graph out, or give --cuda-graph-impl none"
            )
        for fixed, grad in zip(call.output_grads, grads, strict=True):
            if fixed is not None and grad is None:
                fixed.zero_()
            elif fixed is not None and grad is not None:
                load(fixed, grad)
        assert call.backward is not None
        call.backward.replay()
        ctx.lease.end_part()
        # The slot's memory is free when the first part is done, and a pipeline may still be sending this gradient.
        hand_on = torch.clone if ctx.is_first else torch.detach
        of_inputs = [None if grad is None else hand_on(grad) for grad in call.input_grads]
        # A parameter without main_grad keeps what it gets.
        of_parameters = [None if grad is None else grad.clone() for grad in call.parameter_grads]
        return None, None, None, *of_inputs, *of_parameters

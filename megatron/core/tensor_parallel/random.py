# SPDX-License-Identifier: Apache-2.0
"""Named random streams: dropout differs between tensor-parallel ranks where it must and agrees where it has to.

    default stream          the same on all ranks of a tensor-parallel group: dropout on whole hidden states
    model-parallel stream   another one on each rank: dropout inside a parallel layer, on a rank's heads

torch has one generator per device that dropout draws from; a tracker swaps its state. Like that generator, the tracker
is one object per process: it is the second half of the same global fact. `checkpoint` computes a part of the network
again in backward, with the numbers of both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint
from torch import Tensor

from megatron.core.device import get_device_rng_state, get_rng_state, set_device_rng_state, set_rng_state
from megatron.core.device_graphs import is_recording
from megatron.core.errors import ConfigError
from megatron.core.process_groups_config import Group, ProcessGroupCollection
from megatron.core.taken_arguments import take_arguments
from megatron.core.tensor_parallel.kept_activations import Divided, keep_as, set_aside
from megatron.core.tensor_parallel.offloaded_activations import suspended

Decision = TypeVar("Decision")

MODEL_PARALLEL_STREAM = "model-parallel-rng"
EXPERT_PARALLEL_STREAM = "expert-parallel-rng"
DATA_PARALLEL_STREAM = "data-parallel-rng"
_MODEL_PARALLEL_OFFSET = 2718  # so that the streams of neighbouring seeds do not meet


class CudaRNGStatesTracker:
    """Named states of the generator that dropout draws from, on whichever device this process computes."""

    def __init__(self) -> None:
        self._states: dict[str, Tensor] = {}
        # Of the part of the network that is being checkpointed, and of the one that is being computed again.
        self._noted: list[Any] | None = None
        self._repeated: Iterator[Any] | None = None

    def add(self, name: str, seed: int) -> None:
        """Add a new stream, seeded with `seed`. Raises ValueError when the name is taken."""
        if name in self._states:
            raise ValueError(f"the random stream {name!r} exists already; call reset() before seeding anew")
        # Seeding is the only way to make a state, so the generators are seeded, read and put back.
        before = get_rng_state()
        torch.manual_seed(seed)
        self._states[name] = get_device_rng_state()
        set_rng_state(before)

    @contextlib.contextmanager
    def fork(self, name: str = MODEL_PARALLEL_STREAM) -> Iterator[None]:
        """Draw from the named stream inside the block. Raises KeyError when it was never added."""
        if name not in self._states:
            raise KeyError(f"no random stream {name!r}; call model_parallel_cuda_manual_seed() first")
        outside = get_device_rng_state()
        set_device_rng_state(self._states[name])
        try:
            yield
        finally:
            # The stream goes on where the block stopped, and the outer one where it was, also after an exception.
            self._states[name] = get_device_rng_state()
            set_device_rng_state(outside)

    def get_states(self) -> dict[str, Tensor]:
        """Return a copy of every stream's state, as a checkpoint keeps it."""
        return {name: state.clone() for name, state in self._states.items()}

    def look_at_states(self) -> dict[str, Tensor]:
        """Return every stream's state itself, which is never changed in place."""
        return dict(self._states)

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Continue the streams from what `get_states` returned."""
        self._states = {name: state.clone() for name, state in states.items()}

    @contextlib.contextmanager
    def rewound(self, states: dict[str, Tensor], decisions: Iterable[Any] = ()) -> Iterator[None]:
        """Draw as from these states inside the block; afterwards go on as if nothing had been drawn. decisions: what
        `decide_once` returns there, in turn."""
        # States are never changed in place, so the dictionary is all that has to be put back.
        outside = self._states, self._repeated
        self._states, self._repeated = dict(states), iter(decisions)
        try:
            yield
        finally:
            self._states, self._repeated = outside

    @contextlib.contextmanager
    def noting(self, decisions: list[Any]) -> Iterator[None]:
        """Add what `decide_once` returns inside the block to the list."""
        outside, self._noted = self._noted, decisions
        try:
            yield
        finally:
            self._noted = outside

    def decide_once(self, decide: Callable[[], Decision]) -> Decision:
        """Return decide(); in a part of the network that backward computes again, what it returned the first time: it
        may depend on what has happened since."""
        if self._repeated is not None:
            decision: Decision = next(self._repeated)
            return decision
        decision = decide()
        if self._noted is not None:
            self._noted.append(decision)
        return decision

    def reset(self) -> None:
        """Forget every stream."""
        self._states = {}

    def is_initialized(self) -> bool:
        """Return whether any stream was added."""
        return bool(self._states)


_TRACKER = CudaRNGStatesTracker()
_CUDA_RNG_STATE_TRACKER = None
_CUDA_RNG_STATE_TRACKER_INITIALIZED = False
"""Set by programs that start over. Nothing reads them: model_parallel_cuda_manual_seed() always seeds again."""


def get_cuda_rng_tracker(
    use_te_rng_tracker: bool = False, inference_rng_tracker: bool = False, use_cudagraphable_rng: bool = False
) -> CudaRNGStatesTracker:
    """Return the one tracker of this process. Raises RuntimeError where another library's is asked for."""
    if use_te_rng_tracker or inference_rng_tracker or use_cudagraphable_rng:
        raise RuntimeError("random streams have one tracker, torch's generators; leave out te_rng_tracker and the like")
    return _TRACKER


@take_arguments(
    "seed te_rng_tracker inference_rng_tracker use_cudagraphable_rng tp_rank ep_rank etp_rank gtp_remat_rank=0 "
    "egtp_remat_rank=0 force_reset_rng gtp_remat_world_size=1 egtp_remat_world_size=1",
    "weights are not gathered over a group of their own",
)
def model_parallel_cuda_manual_seed(
    seed: int,
    te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
    tp_rank: int | None = None,
    ep_rank: int | None = None,
    etp_rank: int | None = None,
    *,
    force_reset_rng: bool = True,
    pg_collection: ProcessGroupCollection | None = None,
    tracker: CudaRNGStatesTracker | None = None,
) -> None:
    """Seed the default stream with `seed`, and the named ones so that they differ between ranks that must differ.

    tp_rank, ep_rank, etp_rank: this process's place in the tensor-parallel, expert-parallel and expert-tensor-parallel
    group; `pg_collection`'s when None. force_reset_rng: streams start again in any case. The three booleans are as for
    `get_cuda_rng_tracker`.
    """
    own = get_cuda_rng_tracker(te_rng_tracker, inference_rng_tracker, use_cudagraphable_rng)
    groups = pg_collection if pg_collection is not None else ProcessGroupCollection.current()
    tracker = tracker if tracker is not None else own
    tp_rank = groups.tp.rank() if tp_rank is None else tp_rank
    ep_rank = groups.ep.rank() if ep_rank is None else ep_rank
    etp_rank = groups.expt_tp.rank() if etp_rank is None else etp_rank
    torch.manual_seed(seed)
    tracker.reset()
    tracker.add(DATA_PARALLEL_STREAM, seed)
    tracker.add(MODEL_PARALLEL_STREAM, seed + _MODEL_PARALLEL_OFFSET + tp_rank)
    # Upstream's offsets, so that the same seed gives streams that differ between any two experts' ranks.
    expert_seed = seed + 1024 + 100 * ep_rank + etp_rank
    tracker.add(EXPERT_PARALLEL_STREAM, expert_seed)


def get_expert_parallel_rng_tracker_name() -> str:
    """The name of the experts' stream in the tracker of random streams."""
    return EXPERT_PARALLEL_STREAM


@contextlib.contextmanager
def model_parallel_stream(group_size: int) -> Iterator[None]:
    """Draw from this rank's stream inside the block; a group of one has no need of a second stream."""
    tracker = get_cuda_rng_tracker()
    if group_size == 1 or not tracker.is_initialized():
        yield
        return
    with tracker.fork():
        yield


def checkpoint(
    function: Callable[..., Any], distribute_saved_activations: bool, *args: Any, tp_group: Group | None = None
) -> Any:
    """function(*args), of which only the arguments are kept: backward computes it again, with the same random numbers.

    Upstream's signature. distribute_saved_activations: the first argument is the same tensor on all ranks of
    `tp_group`; each keeps a part, and backward gathers them. Source: Chen et al., "Training Deep Nets with Sublinear
    Memory Cost", 2016.
    """
    # Without gradients there is no backward to compute anything for.
    if not torch.is_grad_enabled():
        return function(*args)
    # torch puts its default generator back by itself before it computes again, but knows nothing of the other streams.
    tracker = get_cuda_rng_tracker()
    # The dictionary is copied, the states are not: they are replaced, never changed in place.
    states, decisions = dict(tracker._states), list[Any]()
    keeping: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if distribute_saved_activations:
        group = tp_group if tp_group is not None else ProcessGroupCollection.current().tp
        keeping = keep_as(args[0], Divided(group))
    with keeping:
        return torch.utils.checkpoint.checkpoint(
            function,
            *args,
            # The other form runs a backward pass inside the backward pass, and needs inputs that have gradients.
            use_reentrant=False,
            # A recorded function has no state to go back to; what draws random numbers is not recomputed there.
            preserve_rng_state=not is_recording(),
            context_fn=lambda: (
                _together(tracker.noting(decisions), suspended(), set_aside()),
                _together(tracker.rewound(states, decisions), suspended(), set_aside()),
            ),
        )


class CheckpointWithoutOutput:
    """Like `checkpoint`, but the output is let go of as well, once what reads it has run: backward computes it again
    first.

        part = CheckpointWithoutOutput()
        x = part.checkpoint(norm, hidden)
        y = product(x)
        part.discard_output_and_register_recompute(y)

    Gradients of y must come before anything in backward reads x, and nobody may read x later in forward.
    """

    @take_arguments("fp8 ckpt_manager=None retain_input_tensors=False", "each part is recomputed by itself")
    def __init__(self, fp8: object = None) -> None:
        if fp8:
            raise ConfigError("CheckpointWithoutOutput has no 8-bit numbers for parts of others; leave fp8 out")
        self._recompute: Callable[[], None] | None = None
        self._outputs: tuple[Tensor, ...] = ()

    def checkpoint(self, run_function: Callable[..., Any], *args: Any) -> Any:
        """run_function(*args), a tensor or a tuple of them, of which only the arguments are kept."""
        if not torch.is_grad_enabled():
            return run_function(*args)
        outputs = _WithoutOutput.apply(self, run_function, *args)  # type: ignore[no-untyped-call]
        self._outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return outputs

    def discard_output_and_register_recompute(self, hook_tensor: Tensor) -> None:
        """Free the output's memory until the gradient of `hook_tensor` is there."""
        if self._recompute is None or not hook_tensor.requires_grad:
            return
        for output in self._outputs:
            output.untyped_storage().resize_(0)
        hook_tensor.register_hook(lambda _: self.recompute())

    def recompute(self) -> None:
        """Compute the output again, in the memory that it had; once."""
        again, self._recompute = self._recompute, None
        if again is not None:
            again()
        self._outputs = ()


class _WithoutOutput(torch.autograd.Function):
    """The function without its graph; the graph is made by the part's `recompute`."""

    @staticmethod
    def forward(ctx: Any, part: CheckpointWithoutOutput, function: Callable[..., Any], *args: Any) -> Any:
        tracker = get_cuda_rng_tracker()
        ctx.part, ctx.again = part, None
        streams, default, decisions = dict(tracker._states), get_rng_state(), list[Any]()
        with tracker.noting(decisions):
            outputs = function(*args)
        given = outputs if isinstance(outputs, tuple) else (outputs,)

        def again() -> None:
            ctx.inputs = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in args]
            outside = get_rng_state()
            set_rng_state(default)
            with torch.enable_grad(), tracker.rewound(streams, decisions):
                computed = function(*ctx.inputs)
            set_rng_state(outside)
            ctx.again = computed if isinstance(computed, tuple) else (computed,)
            for output, new in zip(given, ctx.again, strict=True):
                output.untyped_storage().resize_(output.nbytes)
                # Past autograd, which counts changes of what it has kept.
                output.data.copy_(new.detach())

        part._recompute = again
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # type: ignore[override]
        ctx.part.recompute()
        pairs = [(x, grad) for x, grad in zip(ctx.again, grads, strict=True) if x.requires_grad]
        torch.autograd.backward([x for x, _ in pairs], [grad for _, grad in pairs])
        return None, None, *(x.grad if isinstance(x, Tensor) else None for x in ctx.inputs)


@contextlib.contextmanager
def _together(*blocks: contextlib.AbstractContextManager[None]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for block in blocks:
            stack.enter_context(block)
        yield

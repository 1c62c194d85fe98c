# SPDX-License-Identifier: Apache-2.0
"""Save of the last completed iteration when a run ends with an error on some rank.

Made only where it is the state that an undisturbed run would have saved: all ranks that are left have done the same
iteration, no update was under way, every value is finite, and all that a lost rank held is held by a replica of it too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch.distributed import PrefixStore

from megatron.core.errors import MegatronError
from megatron.core.mesh import RankGrid
from megatron.core.process_groups_config import Group, SingleRankGroup, rendezvous_store
from megatron.training.checkpoint.run_tensors import build_sharded_model_state, build_sharded_optimizer_state
from megatron.training.config.checkpoint import FOR_UPSTREAM
from megatron.training.config.container import RunConfig
from megatron.training.rerun.replay import StepStart
from megatron.training.rerun.survivors import SurvivorState, meet, regroup
from megatron.training.run import Run, list_none


class NoEmergencySaveError(Exception):
    """A state that must not be saved, and why not; `speaker` is the rank that says so."""

    def __init__(self, reason: str, speaker: int) -> None:
        self.speaker = speaker
        super().__init__(reason)


def take_condition(run: Run, error: Exception, start: StepStart | None, *, evaluates: bool) -> SurvivorState:
    """This rank's state after a failure; the run goes back to the end of its last iteration.

    start: of the step under way, None between steps. evaluates: an evaluation follows the iteration that was done.
    """
    done = run.progress.iteration
    if isinstance(error, MegatronError) and error.questions_state:
        return SurvivorState(done, "the error puts the state itself in question")
    if run.optimizer.is_changing:
        return SurvivorState(done, "an update of the weights was under way")
    if start is not None and start.progress["iteration"] == done:
        start.put_back(run)
    elif start is not None and evaluates:
        return SurvivorState(done, f"the evaluation after iteration {done} was not finished")
    try:
        return SurvivorState(done, _find_bad_tensor(run))
    # Of a device that computes no more, or a gather of parameters that cannot be finished.
    except RuntimeError as failure:
        return SurvivorState(done, f"its state cannot be read ({' '.join(str(failure).split())[:200]})")


def gather_survivors(run: Run, own: SurvivorState) -> tuple[Group, list[int]]:
    """Return a group of the ranks that are left, and the ranks whose random numbers this one saves: itself, and lost
    replicas. Every rank that is left calls it. Raises NoEmergencySaveError, on all of them."""
    config, world = run.config, run.groups.world
    rank, size = world.rank(), world.size()
    if size == 1:
        _judge(config, run.groups.grid, {0: own})
        return SingleRankGroup(), [0]
    if run.list_ended_ranks is list_none:
        raise NoEmergencySaveError("the processes were joined by the program that calls, which knows of them", 0)
    try:
        store = PrefixStore("megatron/survivors", rendezvous_store())
        conditions = meet(store, rank, size, own, run.list_ended_ranks)
        stand_ins = _judge(config, run.groups.grid, conditions)
        return regroup(store, rank, sorted(conditions)), [rank, *(r for r, other in stand_ins.items() if other == rank)]
    # The store has gone with the process that served it.
    except (RuntimeError, TimeoutError) as failure:
        reason = f"the ranks that are left cannot meet ({' '.join(str(failure).split())[:200]})"
        raise NoEmergencySaveError(reason, rank) from failure


def _judge(config: RunConfig, grid: RankGrid, conditions: dict[int, SurvivorState]) -> dict[int, int]:
    """Return lost rank -> replica that replaces it. Raises NoEmergencySaveError."""
    present = sorted(conditions)
    speaker = present[0]
    if config.checkpoint.ckpt_format in FOR_UPSTREAM:
        reason = f"--ckpt-format {config.checkpoint.ckpt_format} needs the groups of all ranks"
        raise NoEmergencySaveError(reason, speaker)
    for rank in present:
        if (problem := conditions[rank].problem) is not None:
            raise NoEmergencySaveError(f"rank {rank}: {problem}" if grid.world_size > 1 else problem, speaker)
    iterations = {condition.iteration for condition in conditions.values()}
    if len(iterations) > 1:
        raise NoEmergencySaveError(
            f"the ranks that are left have done different iterations: {', '.join(map(str, sorted(iterations)))}",
            speaker,
        )
    if iterations == {0}:
        raise NoEmergencySaveError("no iteration is done yet", speaker)
    stand_ins = {}
    for rank in range(grid.world_size):
        if rank not in conditions:
            found = find_stand_in(config, grid, rank, conditions)
            if isinstance(found, str):
                raise NoEmergencySaveError(found, speaker)
            stand_ins[rank] = found
    return stand_ins


def find_stand_in(config: RunConfig, grid: RankGrid, lost: int, present: Collection[int]) -> int | str:
    """The rank, of those present, that holds all that a lost rank held; what is lost with it, in words, where none
    does."""
    held: list[tuple[str, Sequence[Sequence[int]]]] = [("part of the weights", grid.groups("dp-cp"))]
    has_experts = config.model.num_moe_experts is not None
    if has_experts:
        held.append(("experts", grid.groups("edp")))
    if config.ddp.use_distributed_optimizer or config.ddp.use_torch_fsdp2:
        flag = "--use-torch-fsdp2" if config.ddp.use_torch_fsdp2 else "--use-distributed-optimizer"
        what = f"part of the optimizer's state ({flag})"
        held.append((what, grid.optimizer_groups()[1]))
        if has_experts:
            held.append(
                (f"part of the optimizer's state of experts ({flag})", grid.optimizer_groups(of_experts=True)[1])
            )
    candidates = set(present)
    for what, groups in held:
        candidates &= set(next(ranks for ranks in groups if lost in ranks))
        if not candidates:
            return f"rank {lost} is lost, and none that is left has its {what}"
    # With samples of several lengths replicas draw different numbers of random numbers.
    if config.model.variable_seq_lengths and (config.model.hidden_dropout or config.model.attention_dropout):
        return (
            f"rank {lost} is lost, and none that is left has its random numbers (dropout over sequences of any length)"
        )
    return min(candidates)


def _find_bad_tensor(run: Run) -> str | None:
    """The first tensor to be saved that holds a value that is no number, in words."""
    if run.optimizer.has_failed:
        return "a gradient was not finite, and the updates since were left out"
    for key, tensor in _iterate_saved(run):
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            return f"{key} holds values that are not finite"
    return None


def _iterate_saved(run: Run) -> Iterable[tuple[str, torch.Tensor]]:
    for state in (build_sharded_model_state(run), build_sharded_optimizer_state(run)):
        for key, tensor in state.items():
            yield key, tensor.data

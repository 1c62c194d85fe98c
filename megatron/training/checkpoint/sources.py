# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that a run may go on from, whatever their format: restore.py asks the same of all of them.

From one of upstream's go on weights, optimizer state, iteration, consumed samples and learning-rate schedule. Random
numbers start from --seed: upstream's generators are drawn from in another order, so that their states would not give
upstream's dropout masks here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron.core.config_base import get_settings
from megatron.core.dist_checkpointing import local_checkpoints, serialization
from megatron.core.dist_checkpointing.agreement import on_first_rank, with_everyone
from megatron.core.dist_checkpointing.finding import FoundCheckpoint
from megatron.core.dist_checkpointing.local_checkpoints import FoundPart
from megatron.core.dist_checkpointing.manifest import MANIFEST_NAME
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.safe_pickle import read_metadata
from megatron.core.dist_checkpointing.saved_boxes import BoxReader
from megatron.core.dist_checkpointing.torch_dist import METADATA_NAME
from megatron.core.dist_checkpointing.validation import KeyReport, shorten_list
from megatron.core.errors import CheckpointError, ConfigError
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import Group
from megatron.core.upstream_checkpoints.common_state import CommonState, find_setting, read_common_state
from megatron.core.upstream_checkpoints.flat_state import read_reshaped_state
from megatron.core.upstream_checkpoints.names import explain_unusable_optimizer, read_upstream_tensors
from megatron.core.upstream_checkpoints.rank_file import fill_from_full, read_rank_file
from megatron.core.upstream_checkpoints.rank_files import LegacyCheckpoint, open_legacy
from megatron.training.checkpoint import adapter_saves, rng_state, upcycling
from megatron.training.checkpoint.differences import Change, compare_settings, find_changes
from megatron.training.checkpoint.documents import CONFIG, RNG, read_rng, read_state
from megatron.training.checkpoint.layer_names import ask_for_sections
from megatron.training.checkpoint.local_saves import list_replicas
from megatron.training.checkpoint.save_directories import warn_once
from megatron.training.config.checkpoint import HF_PREFIX
from megatron.training.config.container import RunConfig
from megatron.training.config.run_groups import group_classes
from megatron.training.recipes.recipe import ForeignModel
from megatron.training.run import Run

_COMPARED = (bool, int, float, str)


class SavedState(NamedTuple):
    """State of a run beside its tensors."""

    progress: dict[str, int]
    optimizer: Mapping[str, Any]
    """As `optimizer.load_numbers` takes it; it and the next one count only where they are asked for."""
    scheduler: Mapping[str, Any]
    hooks: dict[str, Any]


class Filling(NamedTuple):
    """Choices of a run that tensors are filled for."""

    replicas: Sequence[Group]
    """Groups whose members share the reading, where the format can."""
    with_state: bool
    """Main parameters are among the tensors, maybe the optimizer's other state, too."""
    tolerated: Mapping[str, Any]
    """may_lack and may_have_more, see validation.judge_wanted."""


class CheckpointSource(ABC):
    """A checkpoint of any format. Every rank calls its methods, in this order; they raise CheckpointError on all."""

    is_ours = False
    is_exact = False
    """True if its weights may be in float32, so that main parameters are loaded from them as well."""
    origin, ending = "", ""
    """Words on it in the sentence that says from where a run goes on: after its path, and at the end."""
    notes: Sequence[str] = ()
    """Sentences on what was left out."""

    weights: FoundCheckpoint | None = None
    """The checkpoint of ours that has all weights, but for adapters."""

    def __init__(self, run: Run, path: Path) -> None:
        """path: named in messages."""
        self.path, self._run = path, run
        self._config, self._world = run.config, run.groups.world

    @abstractmethod
    def find_changes(self) -> list[Change]:
        """Return how the settings of the run differ from the checkpoint's."""

    @abstractmethod
    def read_state(self, *, with_optimizer: bool) -> SavedState:
        """Return what lies beside the tensors. Refuses state of the optimizer that cannot be used."""

    def read_random_numbers(self) -> dict[str, Any] | None:
        """Return the document of rng_state.py; None where the run cannot go on from the saved numbers."""
        return None

    @abstractmethod
    def fill(self, tensors: ShardedStateDict, wish: Filling) -> KeyReport:
        """Fill the tensors of all ranks; returns what was tolerated."""


# ---- ours


class OurSource(CheckpointSource):
    """A checkpoint of ours. filled_but: a damaged one has filled all tensors but these before; None: there was none."""

    is_ours = True

    def __init__(self, run: Run, found: FoundCheckpoint, filled_but: frozenset[str] | None = None) -> None:
        super().__init__(run, found.path)
        self._found, self._filled_but = found, filled_but
        self._base = adapter_saves.find_base(found, self._world, run.config.checkpoint.pretrained_checkpoint)
        self.weights = self._base or found

    def find_changes(self) -> list[Change]:
        # Settings of a run come from its flags, never from the checkpoint, whose settings are only compared.
        try:
            return find_changes(serialization.read_document(self.path, CONFIG), self._config)
        except (ConfigError, TypeError, AttributeError) as error:
            what = f"{self.path / CONFIG}.json cannot be compared with this run's settings"
            warn_once(self._world, f"{what}: {error}")
            return []

    def read_state(self, *, with_optimizer: bool) -> SavedState:
        counts_steps = isinstance(self._run.scheduler, OptimizerParamScheduler)
        state = with_everyone(self._world, lambda: read_state(self.path, counts_steps=counts_steps))
        if with_optimizer and state["optimizer"] is None:
            raise CheckpointError(f"{self.path} was saved with --no-save-optim; pass --no-load-optim or --finetune")
        # Older checkpoints have no hooks.
        return SavedState(state["progress"], state["optimizer"], state["scheduler"], state.get("hooks", {}))

    def read_random_numbers(self) -> dict[str, Any] | None:
        if f"{RNG}.json" not in self._found.manifest.files:
            raise CheckpointError(f"{self.path} was saved with --no-save-rng; pass --no-load-rng or --finetune")
        document = with_everyone(self._world, lambda: read_rng(self.path, self._world.rank()))
        reason = rng_state.explain_unrestorable_state(document, self._world, self._run.groups.grid.sizes)
        if reason is not None:
            warn_once(self._world, f"random numbers start from --seed instead of continuing: {reason}")
        return document if reason is None else None

    def fill(self, tensors: ShardedStateDict, wish: Filling) -> KeyReport:
        report = adapter_saves.load(
            tensors, self._found, self._base, self._world, replicas=wish.replicas, **wish.tolerated
        )
        spoiled = sorted(set(report.lacking) - self._filled_but) if self._filled_but is not None else []
        if spoiled:
            raise CheckpointError(
                f"{self.path} lacks {'; '.join(shorten_list(spoiled))}, which a damaged newer checkpoint has filled; "
                f"start again with --ckpt-step {self._found.manifest.iteration}, so that they begin with their initial "
                "values"
            )
        return report


class LocalSource(OurSource):
    """Parts of a checkpoint on the ranks' nodes, of the same layout: none is lacking and none is left over."""

    def __init__(self, run: Run, part: FoundPart) -> None:
        super().__init__(run, part.checkpoint)
        self._part = part

    def fill(self, tensors: ShardedStateDict, wish: Filling) -> KeyReport:
        local_checkpoints.load(tensors, self._part, group=self._world, replicas=list_replicas(self._run))
        return KeyReport((), ())


# ---- upstream's


class _UpstreamSource(CheckpointSource):
    """A checkpoint in one of upstream's formats, both of which have `common`, the state in addition to the tensors."""

    def __init__(self, run: Run, path: Path, common: CommonState) -> None:
        super().__init__(run, path)
        self._common = common
        # Ours have a manifest also where they are in upstream's formats.
        is_ours = any((directory / MANIFEST_NAME).is_file() for directory in (path, path.parent.parent))
        self.origin = "" if is_ours else ", which upstream wrote"
        self.ending = f"; {'' if is_ours else 'it has no checksums to verify, and '}random numbers start from --seed"

    def find_changes(self) -> list[Change]:
        """Flags of the same name that both give a value."""
        return _find_upstream_changes(self._common, self._config)

    def read_state(self, *, with_optimizer: bool) -> SavedState:
        common = self._common
        if with_optimizer and (common.step_count is None or "num_steps" not in (common.scheduler or {})):
            raise CheckpointError(
                f"{self.path}: it does not say how many updates the optimizer has made; pass --no-load-optim or "
                "--finetune"
            )
        progress = {name: getattr(common, name) for name in _COUNTS}
        optimizer = {"step_count": common.step_count, "optimizer": common.args.get("optimizer", "adam")}
        return SavedState(progress, optimizer, common.scheduler or {}, {})


_COUNTS = ("iteration", "consumed_train_samples", "floating_point_operations")


class TorchDist(_UpstreamSource):
    """Upstream's torch_dist, or modules as torch.distributed.checkpoint saves them."""

    def __init__(self, run: Run, path: Path) -> None:
        common = on_first_rank(run.groups.world, lambda: read_common_state(path, read_metadata(path / METADATA_NAME)))
        super().__init__(run, path, common)

    def read_state(self, *, with_optimizer: bool) -> SavedState:
        def refuse_unusable() -> None:
            reason = explain_unusable_optimizer(read_metadata(self.path / METADATA_NAME))
            if reason is not None:
                raise CheckpointError(f"{self.path}: {reason}")

        if with_optimizer:
            on_first_rank(self._world, refuse_unusable)
        return super().read_state(with_optimizer=with_optimizer)

    def fill(self, tensors: ShardedStateDict, wish: Filling) -> KeyReport:
        reshaped = {}
        if wish.with_state:
            reader = with_everyone(self._world, lambda: BoxReader(self.path, read_metadata(self.path / METADATA_NAME)))
            reshaped = read_reshaped_state(reader, self._common.args, self._world)
        # There each section of a mixer is a separate tensor; in flat buckets, which were put together, it is not.
        flat = {key: tensor for key, tensor in tensors.items() if key in reshaped}
        others = ask_for_sections(self._config.model, {key: tensors[key] for key in tensors if key not in flat})
        # A section's shards may be saved flat, too.
        flat |= {key: tensor for key, tensor in others.items() if key in reshaped}
        others = {key: tensor for key, tensor in others.items() if key not in flat}
        report = read_upstream_tensors(self.path, others, self._world, replicas=wish.replicas, **wish.tolerated)
        fill_from_full(flat, reshaped, self._world, may_have_more=True)
        return report


class RankFiles(_UpstreamSource):
    """Upstream's torch: files of ranks. Every rank maps all of them: a tensor cannot travel before it is read."""

    is_exact = True
    _content: LegacyCheckpoint

    def __init__(self, run: Run, file: Path) -> None:
        super().__init__(run, file, on_first_rank(run.groups.world, lambda: read_rank_file(file).common))

    def find_changes(self) -> list[Change]:
        changes = super().find_changes()
        upcycling.refuse_files_of_ranks(self._run, changes, self.path)
        return changes

    def read_state(self, *, with_optimizer: bool) -> SavedState:
        self._content = with_everyone(self._world, lambda: open_legacy(self.path, with_optimizer=with_optimizer))
        self._content.locate_state(self._world)
        if self._content.ignored:
            self.notes = [f"{len(self._content.ignored)} entries without weights (_extra_state) were ignored"]
        return super().read_state(with_optimizer=with_optimizer)

    def fill(self, tensors: ShardedStateDict, wish: Filling) -> KeyReport:
        return fill_from_full(tensors, self._content.tensors, self._world, **wish.tolerated)


def _find_upstream_changes(common: CommonState, config: RunConfig) -> list[Change]:
    """Return how the model of this run differs from upstream's, in the flags of the same name that both give a
    value."""
    saved = config.to_dict()
    for group, config_class in group_classes().items():
        for name, setting in get_settings(config_class).items():
            then, now = find_setting(common.args, name, setting.name), saved[group].get(name)
            comparable = isinstance(then, _COMPARED) and isinstance(now, _COMPARED)
            if setting.kind in ("shape", "function") and setting.name.startswith("--") and comparable:
                saved[group][name] = then
            # A GPT has no letters, and settings of earlier releases have no such name.
            elif name == "hybrid_layer_pattern":
                saved[group][name] = then or common.args.get("hybrid_override_pattern")
            # It knows no other way.
            elif name == "linear_norm_1p":
                saved[group][name] = True
            # None says that the model is dense, where it says anything.
            elif name == "num_moe_experts" and then is None and "num_experts" in common.args:
                saved[group][name] = None
    try:
        return find_changes(saved, config)
    except (ConfigError, TypeError, AttributeError) as error:
        raise CheckpointError(f"upstream's settings cannot be compared with this run's: {error}") from None


# ---- other programs'


class ForeignSource(CheckpointSource):
    """A Hugging Face directory, whose weights are taken as if it had been converted first."""

    def __init__(self, run: Run, directory: Path) -> None:
        super().__init__(run, directory)
        files = run.recipe.foreign_files
        if files is None:
            raise CheckpointError(
                f"{HF_PREFIX}{directory}: this program reads no Hugging Face directories; start pretrain_gpt.py, or "
                "convert it first: python -m megatron.bridge.convert --source hf --target megatron"
            )
        self._model: ForeignModel = with_everyone(self._world, lambda: files.open(directory, run.config))
        self.notes = self._model.notes

    def find_changes(self) -> list[Change]:
        return compare_settings(self._model.config, self._config)

    def read_state(self, *, with_optimizer: bool) -> SavedState:
        return SavedState({}, {}, {}, {})

    def fill(self, tensors: ShardedStateDict, wish: Filling) -> KeyReport:
        return self._model.load(tensors, self._world, **wish.tolerated)

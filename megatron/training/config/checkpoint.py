# SPDX-License-Identifier: Apache-2.0
"""Settings of saving and loading."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megatron.core.config_base import CheckedConfig, flag, name_multiples
from megatron.core.setting import Needs, PathText

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

UPSTREAM_TORCH_DIST = "upstream_torch_dist"
FOR_UPSTREAM = ("torch", UPSTREAM_TORCH_DIST)
"""Formats that are saved for programs of upstream's."""


# An interval without a directory is no error: scripts switch saving off by leaving --save out.
_SAVING = Needs("--save", lambda run: run.save is not None)
_LOADING = Needs("--load or --pretrained-checkpoint", lambda run: run.load or run.pretrained_checkpoint)
_ASYNC = Needs("--async-save", lambda run: run.async_save)
_WORKER = Needs("--async-save and --use-persistent-ckpt-worker", lambda run: run.use_persistent_ckpt_worker)


_ON_NODES = ("local", "in_memory")
_LOCAL = Needs("--non-persistent-ckpt-type local or in_memory", lambda run: run.non_persistent_ckpt_type in _ON_NODES)
_COPIES = Needs("--replication", lambda run: run.replication)

HF_PREFIX = "hf:"
"""Beginning of --load hf:DIR."""


def find_hf_directory(text: str | None) -> Path | None:
    """DIR of hf:DIR; None for a directory of checkpoints."""
    return Path(text.removeprefix(HF_PREFIX)) if text is not None and text.startswith(HF_PREFIX) else None


_ONE_LENGTH = Needs(
    "sequences of one length; leave out --hybrid-context-parallel", lambda run: not run.hybrid_context_parallel
)
_LORA = Needs("--lora-rank", lambda run: run.lora_rank is not None)
_EXPERTS = Needs("--num-experts", lambda run: run.num_moe_experts is not None)


class Strictness(NamedTuple):
    """Treatment of tensors that differ between checkpoint and model."""

    may_lack: bool
    """Tensors that only the model has keep the values they were initialised with, and are listed."""
    may_have_more: bool
    """Tensors that only the checkpoint has are left out."""
    lists_more: bool = False
    """True if all of them are listed."""


STRICTNESS = {
    "assume_ok_unexpected": Strictness(may_lack=False, may_have_more=False),
    "raise_unexpected": Strictness(may_lack=False, may_have_more=True),
    "raise_all": Strictness(may_lack=False, may_have_more=False),
    "log_unexpected": Strictness(may_lack=True, may_have_more=True),
    "log_all": Strictness(may_lack=True, may_have_more=True, lists_more=True),
    "return_unexpected": Strictness(may_lack=True, may_have_more=True),
    "return_all": Strictness(may_lack=True, may_have_more=True, lists_more=True),
    "ignore_all": Strictness(may_lack=True, may_have_more=True),
}


@dataclass(kw_only=True)
class CheckpointConfig(CheckedConfig):
    """Saving and loading."""

    usual_kind = "report"

    save: PathText | None = None
    """Directory to save checkpoints in: every --save-interval iterations, and when the run ends."""
    save_interval: int | None = flag(
        None, minimum=1, unit="iterations", aliases=("--persistent-save-interval",), needs=_SAVING
    )
    """Iterations between checkpoints. Not given: only the end of the run is saved, also an early one in order."""
    save_retain_interval: int | None = flag(None, minimum=1, unit="iterations", needs=_SAVING)
    """Keep checkpoints of iterations divisible by this; any other goes when the next one is complete, or by
    --keep-last."""
    keep_last: int | None = flag(None, minimum=1, unit="checkpoints", needs=_SAVING)
    """Keep this many of the newest complete checkpoints, in addition to the ones that --save-retain-interval keeps. All
    are kept when neither is given."""
    non_persistent_save_interval: int | None = flag(None, minimum=1, unit="iterations", needs=_SAVING)
    """Iterations between checkpoints of which only the newest is kept, in addition to the ones of --save-interval.
    Where both are due, only the latter is saved."""
    non_persistent_ckpt_type: str | None = flag(
        None,
        choices=("global", *_ON_NODES),
        needs=Needs("--non-persistent-save-interval", lambda run: run.non_persistent_save_interval is not None),
    )
    """global: they are checkpoints like the others, in a directory that all ranks share. local: each rank writes what
    it holds into a directory on its node, also with --async-save while training waits; only the same layout continues
    from there. in_memory: the same in the node's memory (/dev/shm), which outlives the processes, but not the machine;
    the memory is free again when the run has ended in order."""
    non_persistent_global_ckpt_dir: PathText | None = None
    """The directory of `global`, for saving and for loading; `non_persistent` in --save, and in --load, when not
    given."""
    non_persistent_local_ckpt_dir: PathText | None = None
    """The directory of `local` on each node, for saving and for loading; the default for `in_memory` is in /dev/shm."""
    non_persistent_local_ckpt_algo: str = flag(
        "fully_parallel",
        choices=("fully_parallel", "atomic"),
        needs=_LOCAL,
    )
    """Division of the writing of `local` among ranks. fully_parallel: of what data-parallel ranks all hold each writes
    a share, and loading exchanges the shares. atomic: each rank writes all that it holds."""
    replication: bool = flag(False, needs=_LOCAL)
    """Ranks also keep copies of each other's files of `local`: when nodes are lost, those that have come into their
    place fetch the files of their ranks from there."""
    replication_jump: int | None = flag(None, minimum=1, unit="ranks", needs=_COPIES)
    """Ranks at this distance from each other keep copies: usually as many ranks as a node has, so that copies lie on
    other nodes."""
    replication_factor: int = flag(2, minimum=2, needs=_COPIES)
    """Number of ranks that store each file, including the rank it belongs to."""
    async_save: bool = flag(False, needs=_SAVING)
    """Save while training goes on: it stops only while tensors are copied into host memory."""
    use_persistent_ckpt_worker: bool = flag(False, needs=_ASYNC)
    """With --async-save, each rank writes in a separate process instead of a thread."""
    async_ckpt_cpu_priority: int = flag(10, minimum=0, maximum=19, needs=(_ASYNC, _WORKER))
    """Niceness of the process that writes: 19 takes only processor time that nobody else wants."""
    async_ckpt_io_priority: int = flag(3, minimum=0, maximum=3, needs=(_ASYNC, _WORKER))
    """Class of its disk access on Linux, as of ionice: 0 follows from the niceness, 1 real time (for root only), 2 best
    effort, 3 idle."""
    save_hf: PathText | None = None
    """Directory for the model as Hugging Face's programs read it, written when the last iteration is done. A result of
    an earlier run there is replaced."""
    load_adapter: PathText | None = flag(None, needs=_LORA)
    """Directory with adapters that peft has saved, or convert --adapter has written, to begin with; a run that --load
    continues has its own."""
    save_adapter_only: bool = flag(False, needs=(_SAVING, _LORA))
    """Save adapters and their optimizer state alone. The rest of the model is in --pretrained-checkpoint."""
    save_params_interval: int | None = flag(None, minimum=1, unit="iterations", needs=_SAVING)
    """Iterations between dumps of the parameters in `params` in --save."""
    save_wgrads_interval: int | None = flag(None, minimum=1, unit="iterations", needs=_SAVING)
    """Iterations between dumps of the parameters' gradients, before clipping, in `wgrads` in --save."""
    save_activations_interval: int | None = flag(None, minimum=1, unit="iterations", needs=(_SAVING, _ONE_LENGTH))
    """Iterations between dumps of activations in `activations` in --save: the outputs of layers, their norms and linear
    layers, for all microbatches of the step, which each rank keeps in host memory until then."""
    save_dgrads_interval: int | None = flag(None, minimum=1, unit="iterations", needs=(_SAVING, _ONE_LENGTH))
    """Iterations between dumps of the gradients of the same activations in `dgrads` in --save."""
    save_tokens_per_expert_interval: int | None = flag(None, minimum=1, unit="iterations", needs=(_SAVING, _EXPERTS))
    """Iterations between dumps of how many tokens of the step chose each expert, in `tokens_per_expert` in --save."""
    start_over: bool = flag(False, needs=_SAVING)
    """Begin again although --save holds checkpoints that this run does not continue. They stay; one whose iteration is
    saved again becomes `iter_*.earlier-1`; from the first save on --load continues this run."""
    load: PathText | None = None
    """Directory to continue from, also of upstream's checkpoints. The same as --save and empty: a fresh start. hf:DIR:
    start from the weights of a Hugging Face directory."""
    ckpt_format: str = flag(
        "torch_dist", choices=("torch", "torch_dist", UPSTREAM_TORCH_DIST, "torch_dcp", "fsdp_dtensor")
    )
    """Format to save in. torch_dist: one directory for all ranks that any layout can load; it also takes the place of
    torch_dcp, and of fsdp_dtensor, which belongs to --use-megatron-fsdp. For Megatron-LM to load: upstream_torch_dist,
    its torch_dist, or torch, a file for each model-parallel rank."""
    dist_ckpt_optim_fully_reshardable: bool = flag(
        False,
        needs=(
            Needs(
                "--ckpt-format upstream_torch_dist: in torch_dist any layout loads the optimizer of any other",
                lambda run: run.ckpt_format == UPSTREAM_TORCH_DIST,
            ),
            Needs("--use-distributed-optimizer", lambda run: run.use_distributed_optimizer),
        ),
    )
    """In upstream_torch_dist, save the state of the distributed optimizer in the shapes of the parameters, which
    Megatron-LM loads under any layout. Without, in the flat buckets that are its default: it loads them with the same
    tensor-, pipeline- and expert-parallel sizes, this program under any."""
    ckpt_convert_format: str | None = flag(None, choices=("torch", "torch_dist", UPSTREAM_TORCH_DIST))
    """Load, save in this format to --ckpt-convert-save, and end: nothing is trained."""
    ckpt_convert_save: PathText | None = flag(
        None, needs=Needs("--ckpt-convert-format", lambda run: run.ckpt_convert_format is not None)
    )
    """Place to which --ckpt-convert-format saves: in a directory of the format's name there."""
    save_tokenizer_assets: bool = flag(
        True, off_names=("--no-save-tokenizer-assets", "--disable-save-tokenizer-assets")
    )
    """Copy the tokenizer's files into each checkpoint (`iter_*/tokenizer`)."""
    no_save_optim: bool = False
    """Save without optimizer state."""
    no_save_rng: bool = False
    """Save without random-number state."""
    no_load_optim: bool = False
    """Load without optimizer state."""
    no_load_rng: bool = False
    """Load without random-number state."""
    load_main_params_from_ckpt: bool = flag(
        False,
        kind="numerics",
        needs=(
            Needs("--bf16 or --fp16", lambda run: run.bf16 or run.fp16),
            Needs(
                "--no-load-optim, --finetune or --pretrained-checkpoint",
                lambda run: run.no_load_optim or run.finetune or run.pretrained_checkpoint,
            ),
        ),
    )
    """With no optimizer state loaded, take the float32 main parameters from the checkpoint, not from the weights as
    they were rounded to 16 bits: its main parameters where it has them, else its weights."""
    override_ckpt_iteration: int | None = flag(
        None, minimum=0, unit="iterations", kind="numerics", needs=Needs("--load", lambda run: run.load is not None)
    )
    """After loading, count iterations on from this number, which is not below the checkpoint's. Samples, schedule and
    optimizer go on as saved."""
    finetune: bool = False
    """Load weights only: iteration, optimizer and random numbers start afresh."""
    pretrained_checkpoint: PathText | None = None
    """Checkpoint whose weights to start from when --load has nothing yet; also one of upstream's, or hf:DIR, a Hugging
    Face directory."""
    ckpt_step: int | None = flag(None, minimum=0, unit="iterations")
    """Load this iteration instead of the latest."""
    exit_on_missing_checkpoint: bool = flag(False, needs=_LOADING)
    """Stop when --load holds no checkpoint, even where --load is --save."""
    use_checkpoint_args: bool = False
    """Take the model's flags from the checkpoint, or from hf:DIR; flags on the command line win."""
    use_mp_args_from_checkpoint_args: bool = flag(
        False, needs=Needs("--use-checkpoint-args", lambda run: run.use_checkpoint_args)
    )
    """With --use-checkpoint-args, take the tensor- and pipeline-parallel sizes as well."""
    use_tokenizer_model_from_checkpoint_args: bool = True
    """With --use-checkpoint-args, take the tokenizer as well, from the files that the checkpoint carries."""

    dist_ckpt_strictness: str = flag(
        "assume_ok_unexpected",
        choices=("assume_ok_unexpected", "log_unexpected", "log_all", "raise_unexpected", "raise_all",
                 "return_unexpected", "return_all", "ignore_all"),
        needs=_LOADING,
    )  # fmt: skip
    """Action where checkpoint and model have different tensors. assume_ok_unexpected, raise_all: refuse.
    raise_unexpected: leave out what only the checkpoint has. log_all, return_all: in addition keep the initial values
    of what only the model has, and list both; log_unexpected, return_unexpected, ignore_all: list only the latter.
    Another shape is always refused."""
    ckpt_fully_parallel_load: bool = flag(False, needs=_LOADING)
    """Of what all data-parallel ranks need, each reads a share of the files and broadcasts it. Faster where the storage
    is slower than the network between the ranks; without, each reads all that it needs."""
    override_model_settings: bool = flag(False, needs=_LOADING)
    """Go on with this run's value of a setting that changes what the loaded weights compute, such as --rotary-base."""

    @property
    def saves_non_persistent(self) -> bool:
        """True if there are checkpoints of which only the newest stays."""
        return self.save is not None and self.non_persistent_save_interval is not None

    @property
    def saves_locally(self) -> bool:
        """True if they are stored on the ranks' nodes."""
        return self.saves_non_persistent and self.non_persistent_ckpt_type in _ON_NODES

    @property
    def local_ckpt_dir(self) -> str | None:
        """The directory for those on each node; None where there are none."""
        if self.non_persistent_local_ckpt_dir is None and self.non_persistent_ckpt_type == "in_memory":
            # A file system in memory, which users share.
            return f"/dev/shm/megatron-{os.getuid()}"
        return self.non_persistent_local_ckpt_dir

    @property
    def loads_locally(self) -> bool:
        """True if one is to be looked for on the ranks' nodes: it continues a run with all of its state."""
        parts = (self.finetune, self.no_load_optim, self.no_load_rng, self.ckpt_step is not None)
        return self.load is not None and self.local_ckpt_dir is not None and not any(parts)

    def loads_main_params(self, model: TransformerConfig) -> bool:
        """Return whether main parameters are loaded where the optimizer's state is not. The same on all ranks: what
        follows from it is collective."""
        return self.load_main_params_from_ckpt and (model.bf16 or model.fp16)

    def rules(self) -> Iterator[str]:
        """Intervals, places, and what is loaded."""
        interval, kept = self.save_interval, self.save_retain_interval
        # Only iterations that are saved can stay: with another number some of those to be kept would never be written.
        if kept is not None and interval is not None and kept % interval:
            yield (
                f"{self.say('save_retain_interval')} is not a multiple of {self.say('save_interval')}; "
                f"use {name_multiples(kept, interval)}"
            )
        if self.non_persistent_save_interval is not None and self.non_persistent_ckpt_type is None:
            kinds = "global, local or in_memory"
            yield f"{self.say('non_persistent_save_interval')} needs --non-persistent-ckpt-type {kinds}"
        if self.saves_locally and self.local_ckpt_dir is None:
            yield f"{self.say('non_persistent_ckpt_type')} needs --non-persistent-local-ckpt-dir"
        if self.saves_locally and self.replication and self.replication_jump is None:
            yield (
                "--replication needs --replication-jump, the distance between ranks that keep copies of each other's "
                "files; give the number of ranks of a node"
            )
        for name in ("no_save_optim", "no_save_rng"):
            if self.saves_locally and getattr(self, name):
                yield f"{self.say(name)}: {self.say('non_persistent_ckpt_type')} saves all state; leave one of them out"
        other = self.non_persistent_global_ckpt_dir
        # Of all that is in it only the newest stays.
        if other is not None and self.save is not None and os.path.realpath(other) == os.path.realpath(self.save):
            yield f"{self.say('non_persistent_global_ckpt_dir')} is also --save; give it a directory of its own"
        paths = ("save", "save_hf", "load", "pretrained_checkpoint", "ckpt_convert_save")
        for name in (*paths, "non_persistent_global_ckpt_dir", "non_persistent_local_ckpt_dir"):
            path = getattr(self, name)
            if path is not None and path.startswith(HF_PREFIX) and name not in ("load", "pretrained_checkpoint"):
                yield f"{self.say(name)}: {HF_PREFIX} belongs to --load; --save-hf names a directory to write"
            # As a path it would be a local directory called "s3:".
            if path is not None and "://" in path:
                yield f"{self.say(name)} is in object storage, checkpoints are files and directories; give a path"
        if self.ckpt_convert_format is not None and (self.ckpt_convert_save is None or self.load is None):
            yield f"{self.say('ckpt_convert_format')} needs --load, what to convert, and --ckpt-convert-save, where to"
        if self.save_adapter_only and self.save is not None:
            if self.pretrained_checkpoint is None or find_hf_directory(self.pretrained_checkpoint) is not None:
                yield (
                    "--save-adapter-only needs --pretrained-checkpoint DIR, a checkpoint of this program that keeps "
                    "the rest of the model; a Hugging Face directory becomes one with python -m megatron convert"
                )
            if self.ckpt_format in FOR_UPSTREAM:
                yield (
                    f"--save-adapter-only: {self.say('ckpt_format')} is for Megatron-LM, which has no adapters; leave "
                    "one of them out"
                )
        if self.ckpt_step is not None and self.load is None:
            yield f"{self.say('ckpt_step')} needs --load"
        starts_afresh = find_hf_directory(self.load) is not None
        if starts_afresh and self.pretrained_checkpoint is not None:
            yield (
                f"{self.say('load')} has weights, so that --pretrained-checkpoint would never be read; give one of them"
            )
        for name in ("ckpt_step", "override_ckpt_iteration"):
            if starts_afresh and getattr(self, name) is not None:
                yield f"{self.say(name)}: {self.say('load')} has no iterations; leave it out"
        if self.override_ckpt_iteration is not None and self.finetune:
            yield f"{self.say('override_ckpt_iteration')} contradicts --finetune, which starts at iteration 0; keep one"
        if self.use_checkpoint_args and self.load is None and self.pretrained_checkpoint is None:
            yield "--use-checkpoint-args needs --load or --pretrained-checkpoint"

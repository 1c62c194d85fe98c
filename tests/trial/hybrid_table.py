# SPDX-License-Identifier: Apache-2.0
"""Every kind of sublayer, and mixtures of them, under every layout: the run of one process, and its checkpoints.

A table of `ROWS`, decoders of letters of odd sizes, and `LAYOUTS`. A cell is trained from the start, and its losses are
compared with one process's; and it goes on from a checkpoint that another layout wrote in the middle, with the same
losses. Which layout goes on from which, where stages are cut, and which cells of a GPT's row are described by letters,
are functions of the table's seed.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import random
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

from megatron.core.errors import ConfigError
from megatron.training.checkpoint.save import save_checkpoint
from megatron.training.flags.read import read_run_config
from megatron.training.loop import open_batches
from megatron.training.recipes.gpt import build_gpt_recipe
from megatron.training.step import train_step
from megatron.training.verify.parity import open_local_run
from megatron.training.verify.parity_layouts import ParityLayout, parse_layout
from tests.parallel.harness import WorkerError, run_distributed
from tests.parallel.small_training import own_rank
from tests.trial.random_layouts import LIMIT_SECONDS, measure_difference
from tests.trial.verdict import Verdict

SAVED_AT, ITERATIONS = 2, 4
TOLERANCE = 1e-6
"""Relative difference of a loss."""
# 152 tokens: two chunks of 64 and a piece of one; 38 tokens on each of two context-parallel ranks, 19 in each piece.
COMMON = """--hidden-size 72 --seq-length 152 --max-position-embeddings 152 --vocab-size 1009 --hidden-dropout 0
    --attention-dropout 0 --mock-data --tokenizer-type NullTokenizer --eval-iters 0 --num-workers 0 --lr 1e-3
    --micro-batch-size 2 --global-batch-size 8 --adam-eps 1e-6 --train-iters 4 --position-embedding-type rope
    --normalization RMSNorm --mamba-head-dim 10 --mamba-state-dim 7 --linear-key-head-dim 9 --linear-value-head-dim 9
    --linear-conv-kernel-dim 3 --save-interval 100 --log-interval 100"""
ODD = """--num-attention-heads 6 --ffn-hidden-size 51 --mamba-num-heads 6 --mamba-num-groups 3
    --linear-num-key-heads 3 --linear-num-value-heads 6"""
WIDE = """--num-attention-heads 12 --ffn-hidden-size 52 --mamba-num-heads 12 --mamba-num-groups 4
    --linear-num-key-heads 4 --linear-num-value-heads 12"""
"""For tensor parallelism, also of four ranks, which have three heads each then."""
LATENT = """--multi-latent-attention --q-lora-rank 13 --kv-lora-rank 11 --qk-head-dim 10 --qk-pos-emb-head-dim 6
    --v-head-dim 7"""
EXPERTS = """--num-experts 6 --moe-router-topk 2 --moe-ffn-hidden-size 28 --moe-aux-loss-coeff 0.1
    --moe-token-dispatcher-type alltoall --disable-bias-linear"""
ROWS = {
    "M": ("MMMMM", ""),
    "G": ("GGGGG", ""),
    "G of the second form": ("GGGGG", "--experimental-attention-variant gdn2"),
    "K": ("KKKKK", ""),
    "*": ("*****", ""),
    "+": ("+++++", ""),
    "-": ("-----", ""),
    "E": ("EEEEE", ""),
    "like Nemotron-H": ("M-M*-ME-", "--squared-relu"),
    "like Qwen3-Next": ("GEGE*EG/*E", "--swiglu --moe-shared-expert-intermediate-size 28 --attention-output-gate"),
    "like Kimi Linear": ("K-K+EMG/+-/+-", "--swiglu --untie-embeddings-and-output-weights"),
    "GPT": ("*-*-*-", "--swiglu"),
    "GPT with experts": ("*E*E*E", "--swiglu"),
}
"""Name -> letters without cuts, and flags."""
LAYOUTS = {
    "1": ("1", 1), "tp2·sp": ("tp2,sp", 1), "tp4": ("tp4", 1), "cp2": ("cp2", 1), "cp4": ("cp4", 1), "pp2": ("pp2", 2),
    "pp3": ("pp3", 3), "vpp": ("pp2", 4), "zb-v": ("pp2,--pipeline-schedule=zb-v", 4), "dp2": ("dp2,dist-opt", 1),
    "FSDP2": ("dp2,fsdp2", 1), "tp2·pp2·ep2": ("tp2,sp,pp2,ep2,etp1", 2),
}  # fmt: skip
"""Name -> layout, and stages that cuts make, the virtual ones."""
BY_FLAGS = ", by flags"
"""Behind a layout's name where a GPT's layers are not described by letters. Its initial weights are others."""


class Model(NamedTuple):
    """A decoder that all its layouts have."""

    row: str
    is_wide: bool
    """Sizes that four divides."""
    adds_experts: bool
    """A last letter E, which the row has not."""

    @property
    def letters(self) -> str:
        """Its pattern without cuts."""
        main, *prediction = ROWS[self.row][0].split("/")
        return "/".join([main + "E" * self.adds_experts, *prediction])

    @property
    def flags(self) -> list[str]:
        """All that is no part of a layout."""
        parts = [COMMON, WIDE if self.is_wide else ODD, ROWS[self.row][1]]
        if "K" in self.letters:
            parts.append(f"--linear-num-key-heads {12 if self.is_wide else 6}")
        if "+" in self.letters:
            parts.append(LATENT)
        else:
            parts.append(f"--group-query-attention --num-query-groups {4 if self.is_wide else 3}")
        if "E" in self.letters:
            parts.append(EXPERTS)
        return " ".join(parts).split()


class Cell(NamedTuple):
    """A model under a layout."""

    seed: int
    """Of the table."""
    model: Model
    name: str
    """Of the layout, and how the layers are described."""
    before: str
    """The layout whose checkpoint it goes on from."""

    @property
    def reference(self) -> str:
        """One process with the same description."""
        return "1" + BY_FLAGS * self.is_by_flags

    @property
    def is_by_flags(self) -> bool:
        """Whether layers are described without letters."""
        return self.name.endswith(BY_FLAGS)

    def text(self) -> str:
        """Row and column."""
        return f"{self.model.row} | {self.name} | from {self.before}: {self.argv[-1]}"

    @property
    def layout(self) -> ParityLayout:
        """Its processes."""
        return parse_layout(LAYOUTS[self.name.removesuffix(BY_FLAGS)][0])

    @property
    def argv(self) -> list[str]:
        """Its command line; what describes layers and stages is the last word."""
        layout = self.layout
        # Rows of padding take part in the softmax: the same number everywhere.
        padding = f"--make-vocab-size-divisible-by={1024 // layout.sizes['tp']}"
        return [*self.model.flags, *layout.flags, padding, *self._describe_layers()]

    def _describe_layers(self) -> list[str]:
        draw = random.Random(f"{self.seed} {self.model} {self.name}")
        main, *prediction = self.model.letters.split("/")
        count = LAYOUTS[self.name.removesuffix(BY_FLAGS)][1]
        layers = "t" * (len(main) // 2) if self.is_by_flags else main
        # Anywhere: a stage may have no layers.
        places = sorted(draw.choices(range(len(layers) + 1), k=count - 1))
        stages = "|".join(layers[start:end] for start, end in zip([0, *places], [*places, len(layers)], strict=True))
        if self.is_by_flags:
            cut = [f"--pipeline-model-parallel-layout=E{stages}L"] if count > 1 else []
            return [*cut, f"--num-layers={len(layers)}"]
        return [f"--hybrid-layer-pattern={'/'.join([stages, *prediction])}"]


@functools.cache
def list_cells(seed: int) -> tuple[Cell, ...]:
    """The table, row by row. The layouts of a model stand in a ring, each going on from the one before it."""
    cells = []
    for row, (letters, _) in ROWS.items():
        models: dict[Model, list[str]] = {}
        for name, (layout, _) in LAYOUTS.items():
            model = Model(row, "tp" in layout, "ep" in layout and "E" not in letters)
            models.setdefault(model, [] if name == "1" else ["1"]).append(name)
        for model, names in models.items():
            draw = random.Random(f"{seed} {model}")
            draw.shuffle(names)
            if row.startswith("GPT") and not model.adds_experts:
                names = [name + BY_FLAGS * draw.choice([False, True]) for name in names]
            cells += [Cell(seed, model, name, names[index - 1]) for index, name in enumerate(names)]
    return tuple(cells)


def draw_pair(row: str, seed: int) -> list[Cell]:
    """Two layouts of a row, the first going on from one process's checkpoint, the second from the first one's."""
    cells = [cell for cell in list_cells(seed) if cell.model.row == row and cell.name != cell.reference]
    pairs = [pair for pair in itertools.permutations(cells, 2) if pair[0].model == pair[1].model]
    first, second = random.Random(f"{seed} {row}").choice(pairs)
    return [first._replace(before=first.reference), second._replace(before=first.name)]


# ---- judging a cell


def train_twice(argv: list[str], world_size: int, save: str, load: str | None) -> list[list[dict[str, float]]]:
    """One rank's losses of the whole run, which saves in its middle, and those behind another's checkpoint."""
    losses = []
    for more in [["--save", save]] + ([["--load", load]] if load is not None else []):
        config = read_run_config([*argv, *more], {"WORLD_SIZE": str(world_size)})
        losses.append([])
        # What it says of the checkpoint is of no interest here.
        with (
            contextlib.redirect_stdout(io.StringIO()),
            open_local_run(config, build_gpt_recipe(config), own_rank(config)) as run,
        ):
            batches = open_batches(run)
            while run.progress.iteration < ITERATIONS:
                result = train_step(run, batches)
                losses[-1].append({name: float(loss) for name, loss in result.losses.items()})
                if run.progress.iteration == SAVED_AT and "--save" in more:
                    save_checkpoint(run)
    return losses


class Table:
    """Cells that ran, and their checkpoints, in a directory that goes with it."""

    def __init__(self) -> None:
        self._root = Path(tempfile.mkdtemp(prefix="hybrid-table-"))
        self._losses: dict[tuple[Model, str], list[dict[str, float]]] = {}

    def close(self) -> None:
        """Remove the checkpoints."""
        shutil.rmtree(self._root)

    def judge(self, cell: Cell) -> Verdict:
        """Run a cell, and before it those that it is compared with and goes on from."""
        command = (
            f"python -m torch.distributed.run --standalone --nproc_per_node {cell.layout.world_size} pretrain_gpt.py "
            + " ".join(cell.argv)
        )
        try:
            read_run_config(cell.argv, {"WORLD_SIZE": str(cell.layout.world_size)})
        except ConfigError as error:
            # Each cell is one that a run may ask for.
            return Verdict("fault", f"refused: {error}", command)
        try:
            for name in (cell.reference, cell.before):
                if (cell.model, name) not in self._losses:
                    self._run(cell._replace(name=name), None)
            wanted, before = (self._losses[cell.model, name] for name in (cell.reference, cell.before))
            whole, behind = self._run(cell, cell.before)
        except WorkerError as error:
            return Verdict("fault", str(error), command)
        worst, worst_behind = measure_difference(wanted, whole), measure_difference(before[SAVED_AT:], behind)
        text = f"losses differ by {worst:.1e}, {worst_behind:.1e} behind the checkpoint (limit {TOLERANCE:.0e})"
        return Verdict("ran" if worst <= TOLERANCE and worst_behind <= TOLERANCE else "fault", text, command)

    def _run(self, cell: Cell, before: str | None) -> list[list[dict[str, float]]]:
        world = cell.layout.world_size
        save = self._place(cell.model, cell.name)
        shutil.rmtree(save, ignore_errors=True)
        load = None if before is None else str(self._place(cell.model, before))
        found = run_distributed(train_twice, world, cell.argv, world, str(save), load, timeout=LIMIT_SECONDS)[0]
        self._losses[cell.model, cell.name] = found[0]
        return found

    def _place(self, model: Model, name: str) -> Path:
        return self._root / f"{list(ROWS).index(model.row)}-{model.is_wide:d}{model.adds_experts:d}-{name}"

# SPDX-License-Identifier: Apache-2.0
"""tools/checkpoint: looking into checkpoints, comparing them, and what is said of directories that are not sound."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import sys
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.cli import average_checkpoints, check_checkpoint, inspect_checkpoint
from megatron.cli.inspect_checkpoint import build_tree, format_tree
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.directory import TRACKER_NAME
from megatron.core.dist_checkpointing.directory_lock import DirectoryLock, Holder
from megatron.core.dist_checkpointing.manifest import MANIFEST_NAME, Manifest, read_manifest
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.host_memory import name_machine
from megatron.core.placement import Piece, Placement
from megatron.core.upstream_checkpoints import stored_tensors
from megatron.core.upstream_checkpoints.stored_tensors import open_checkpoint
from tests.support.small_checkpoints import ALONE, find, save

ROOT = Path(__file__).resolve().parents[3]
TOOLS = {"inspect_checkpoint.py": inspect_checkpoint, "doctor.py": check_checkpoint, "average.py": average_checkpoints}


class Tool:
    """Runs a tool in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, program: str, *arguments: Any) -> tuple[int, str, str]:
        """Exit code, output, errors."""
        self.monkeypatch.setattr(sys, "argv", [program, *map(str, arguments)])
        code = TOOLS[program].main()
        return code, *self.capsys.readouterr()

    def read_json(self, program: str, *arguments: Any) -> Any:
        _, out, err = self(program, *arguments, "--json")
        assert err == ""
        return json.loads(out)


@pytest.fixture
def run_tool(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tool:
    return Tool(monkeypatch, capsys)


def save_layers(root: Path, iteration: int, *, scale: float = 1.0, rows: int = 1024, **documents: Any) -> Path:
    """A checkpoint with two layers that are alike, and a vocabulary of 1009 padded to `rows`."""
    # Layer 0 in two boxes, as two tensor-parallel ranks would have saved it.
    boxes = [((start, 6), (0, 6)) for start in (0, 6)]
    pieces = tuple(Piece(box, box, owned=True) for box in boxes)
    one = torch.arange(72.0).view(12, 6) * scale
    table = torch.zeros(rows, 6, dtype=torch.bfloat16)
    table[:1009] = 2.0
    table[1009:] = rows
    tensors = {
        "decoder.layers.0.fc1": ShardedTensor("decoder.layers.0.fc1", one, (12, 6), pieces),
        "decoder.layers.1.fc1": ShardedTensor.whole("decoder.layers.1.fc1", one + 1),
        "embedding": ShardedTensor.from_placement(table, Placement("embedding", (rows, 6), valid_rows=1009)),
        "optimizer.state.exp_avg.embedding": ShardedTensor.whole("optimizer.state.exp_avg.embedding", torch.ones(3)),
    }
    root.mkdir(exist_ok=True)
    return serialization.save(tensors, root, iteration, documents=documents, group=ALONE)


# ---- inspect_checkpoint.py


def test_tree_has_shapes_formats_and_bytes(tmp_path: Path, run_tool: Tool) -> None:
    save_layers(tmp_path / "ckpt", 10)
    code, out, err = run_tool("inspect_checkpoint.py", tmp_path / "ckpt")
    assert (code, err) == (0, "")
    assert "format torch_dist, iteration 10, written by 1 process" in out
    assert re.search(r"weights +3 tensors +6,288 elements +12.9 KB", out)
    assert re.search(r"0-1 \(2 alike\)\.fc1 +\[12, 6\] +float32 +288 bytes", out)
    assert re.search(r"embedding +\[1024, 6\] \(1009 rows used\) bfloat16 +12.3 KB", out)
    _, every, _ = run_tool("inspect_checkpoint.py", tmp_path / "ckpt", "--all")
    assert "alike" not in every and "1.fc1" in every


def test_norms_leave_out_padding_and_name_values_that_are_not_finite(tmp_path: Path, run_tool: Tool) -> None:
    path = save_layers(tmp_path / "ckpt", 10, config={"model": {"num_layers": 2}}, state={"progress": 1})
    report = run_tool.read_json("inspect_checkpoint.py", path, "--norms")
    entry = report["tensors"]["embedding"]
    assert entry["norm"] == pytest.approx(2 * math.sqrt(1009 * 6)) and entry["largest"] == 2
    assert (entry["shape"], entry["dtype"], entry["valid_rows"]) == ([1024, 6], "bfloat16", 1009)
    assert report["settings"] == {"model": {"num_layers": 2}} and report["state"] == {"progress": 1}
    bad = save_layers(tmp_path / "bad", 10, scale=math.inf)
    _, out, _ = run_tool("inspect_checkpoint.py", bad, "--norms", "--only", "*layers.0*")
    assert "72 NaN OR INFINITE" in out  # 0 x infinity is NaN


def test_difference_of_two_checkpoints(tmp_path: Path, run_tool: Tool) -> None:
    first = save_layers(tmp_path / "a", 10, config={"lr": 1, "tp": 1})
    same = save_layers(tmp_path / "b", 10, rows=1012, config={"lr": 1, "tp": 1})
    code, out, _ = run_tool("inspect_checkpoint.py", "--diff", first, same)
    assert code == 0 and "4 tensors are the same, 0 differ" in out, "padding is no difference"
    other = save_layers(tmp_path / "c", 10, scale=1.5, config={"lr": 2, "tp": 1})
    code, out, _ = run_tool("inspect_checkpoint.py", "--diff", first, other)
    assert code == 1 and "2 tensors are the same, 2 differ" in out
    assert re.search(r"0\.fc1 +relative 5.00e-01 +largest 35.5 +71 elements", out), out
    assert "setting lr: 1, then 2" in out and "setting tp" not in out
    report = run_tool.read_json("inspect_checkpoint.py", "--diff", first, other)
    assert report["different"]["decoder.layers.0.fc1"] == {"relative": 0.5, "largest": 35.5, "elements": 71}
    code, out, _ = run_tool("inspect_checkpoint.py", "--diff", first, save(tmp_path / "d", 10))
    assert code == 1 and "only in A" in out and "only in B" in out


def test_upstreams_checkpoints_are_read(golden_dir: Path, run_tool: Tool) -> None:
    divided = run_tool.read_json("inspect_checkpoint.py", golden_dir / "ckpt" / "b_iter10_torch_dist", "--norms")
    alone = run_tool.read_json("inspect_checkpoint.py", golden_dir / "ckpt" / "b_iter10_torch", "--norms")
    assert (divided["format"], alone["format"]) == ("torch_dist (upstream)", "torch (upstream)")
    assert divided["iteration"] == alone["iteration"] == 10
    assert "common_state/shard_0_1" in divided["objects"]
    # Both hold the same run: a tensor stacked over layers has the norm of its layers together.
    name = "decoder.layers.{}self_attention.linear_qkv.weight"
    layers = [alone["tensors"][name.format(f"{i}.")]["norm"] for i in range(4)]
    assert divided["tensors"][name.format("")]["norm"] == pytest.approx(math.hypot(*layers))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "give one PATH, or --diff A B"),
        (["nowhere"], "nowhere does not exist; give a checkpoint"),
        (["."], "holds no checkpoint itself, ckpt does; give ckpt"),
        (["ckpt/other"], "other holds no checkpoint in the formats torch_dist or torch"),
        (["ckpt", "--iteration", "20"], "ckpt holds no iteration 20; saved iterations: 10"),
        (["ckpt", "--only", "x*"], "--only x*: none of the 2 tensors of"),
        (["--diff", "ckpt"], "expected 2 arguments"),
    ],
)
def test_what_cannot_be_inspected(
    tmp_path: Path, run_tool: Tool, monkeypatch: pytest.MonkeyPatch, arguments: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "ckpt", 10)
    (tmp_path / "ckpt" / "other").mkdir()
    code, out, err = run_tool("inspect_checkpoint.py", *arguments)
    assert (code, out) == (2, "") and sentence in err and err.count("error:") == 1


def test_a_checkpoint_of_ours_that_lost_its_manifest_is_shown_as_one(tmp_path: Path, run_tool: Tool) -> None:
    (save_weights(tmp_path / "ckpt", 10, 1.0) / MANIFEST_NAME).unlink()
    assert (
        run_tool.read_json("inspect_checkpoint.py", tmp_path / "ckpt")["format"]
        == "torch_dist without its manifest.json"
    )


def test_damaged_and_hostile_checkpoints_are_refused(tmp_path: Path, run_tool: Tool) -> None:
    path = save(tmp_path / "ckpt", 10)
    shards = path / "__0_0.distcp"
    shards.write_bytes(shards.read_bytes()[:500])
    code, _, err = run_tool("inspect_checkpoint.py", path, "--norms")
    assert code == 2 and "__0_0.distcp is damaged" in err
    (path / ".metadata").write_bytes(b"cos\nsystem\n(S'touch canary'\ntR.")
    code, _, err = run_tool("inspect_checkpoint.py", path)
    assert code == 2 and "refused class os.system" in err


def test_chains_and_numbers_of_the_tree() -> None:
    lines = {f"layers.{i}.w": "x" for i in (0, 1, 2, 10)} | {"a.b": "y", "a.b.c": "z"}
    assert list(format_tree(build_tree(lines), merge=True)) == [
        ("a.b", ""), ("  ", "y"), ("  c", "z"), ("layers", ""), ("  0-2 (3 alike).w", "x"), ("  10.w", "x"),
    ]  # fmt: skip


def test_boxes_make_up_the_tensor(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_layers(tmp_path / "ckpt", 10))
    tensor = checkpoint.tensors[0]
    boxes = list(tensor.boxes())
    assert [box[0] for box, _ in boxes] == [(0, 6), (6, 6)]
    assert torch.equal(tensor.read(), torch.cat([values for _, values in boxes]))


# ---- doctor.py


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def lose_manifest(root: Path) -> None:
    (root / "iter_0000020" / "manifest.json").unlink()


def stop_in_the_middle(root: Path) -> None:
    (root / "iter_0000030.tmp-0123abcd").mkdir()


def leave_lock(root: Path) -> None:
    gone = Holder("run", "host", 2**22 + 1, "then", name_machine(), 1)
    (root / "save-00000001.lock").write_bytes(gone.format(1))


def lock_elsewhere(root: Path) -> None:
    (root / "save-00000001.lock").write_bytes(Holder("run", "host", 1, "then", "another machine", 1).format(1))


def write_table_that_names_no_file(root: Path) -> None:
    (root / "iter_0000020" / "__0_0.distcp").unlink()
    manifest = read_manifest(root / "iter_0000020")
    files = {name: record for name, record in manifest.files.items() if name != "__0_0.distcp"}
    lose_manifest(root)
    Manifest(20, manifest.run_id, 1, files).write(root / "iter_0000020")


DISORDERS: dict[str, tuple[Callable[[Path], Any], str, str, str, int]] = {
    "a flipped bit": (lambda root: flip_byte(root / "iter_0000020" / "__0_0.distcp"), "problem",
        "__0_0.distcp is damaged: its checksum is", "a run takes iter_0000010 instead", 10),
    "a lost file": (lambda root: (root / "iter_0000020" / "state.json").unlink(), "problem",
        "state.json is missing", "a run takes iter_0000010 instead", 10),
    "a file the table names": (write_table_that_names_no_file, "problem",
        "names '__0_0.distcp', which is not there", "move iter_0000020 away: a run takes it and fails", 20),
    "no manifest, no table": (lambda root: (lose_manifest(root), (root / "iter_0000020/.metadata").unlink()), "problem",
        "holds no manifest.json", "a run takes iter_0000010 instead", 10),
    "no manifest": (lose_manifest, "warning", "has no manifest.json", "restore it from a copy", 10),
    "no tracker": (lambda root: (root / TRACKER_NAME).unlink(), "warning", "is missing", "only a hint", 20),
    "odd tracker": (lambda root: (root / TRACKER_NAME).write_text("1_0"), "warning",
        "does not hold the number of an iteration", "only a hint", 20),
    "old tracker": (lambda root: (root / TRACKER_NAME).write_text("10"), "warning",
        "the tracker names iter_0000010, and there is a newer", "--ckpt-step 20 takes the newer one", 10),
    "an interrupted save": (stop_in_the_middle, "warning",
        "iter_0000030.tmp-0123abcd (0 bytes) is left of an interrupted save", "finishes or removes it", 20),
    "a lock that is left": (leave_lock, "note", "which has ended", "takes the directory over", 20),
    "a lock of elsewhere": (lock_elsewhere, "warning", "cannot be seen from here", "sign of life", 20),
}  # fmt: skip


@pytest.mark.parametrize("disorder", DISORDERS)
def test_disorder_is_named_with_a_remedy(tmp_path: Path, run_tool: Tool, disorder: str) -> None:
    cause, level, what, remedy, chosen = DISORDERS[disorder]
    root = tmp_path / "ckpt"
    save(root, 10)
    save(root, 20)
    cause(root)
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    code, out, err = run_tool("doctor.py", root)
    assert (code, err) == (int(level != "note"), "")
    assert re.search(f"{level}: .*{re.escape(what)}.*\n  what to do: .*{re.escape(remedy)}", out), out
    assert f"continues from iter_{chosen:07d}." in out
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before, "nothing is changed"
    # What it says of --load is what --load does.
    found = find(root)
    assert found is not None and found.manifest.iteration == chosen


def test_sound_directory_and_one_in_use(tmp_path: Path, run_tool: Tool) -> None:
    path = save(tmp_path / "ckpt", 10)
    for place in (tmp_path / "ckpt", path):
        code, out, _ = run_tool("doctor.py", place)
        assert code == 0 and "complete, checksums fit" in out and "what to do" not in out
    flip_byte(path / "__0_0.distcp")
    code, out, _ = run_tool("doctor.py", path.parent, "--quick")
    assert code == 0 and "complete (sizes only)" in out
    lock = DirectoryLock(tmp_path / "ckpt", lambda sentence: None)
    stop_in_the_middle(tmp_path / "ckpt")
    report = run_tool.read_json("doctor.py", tmp_path / "ckpt")
    lock.release()
    texts = [(finding["level"], finding["what"]) for finding in report["findings"]]
    # Of this very process, which is in one run at a time: the lock counts as left.
    assert ("warning", "iter_0000030.tmp-0123abcd (0 bytes) is left of an interrupted save") in texts
    assert report["chosen"] is None and any(level == "problem" for level, _ in texts)


def test_storage_that_takes_no_further_save(tmp_path: Path, run_tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "ckpt", 10)
    with monkeypatch.context() as patches:
        patches.setattr("shutil.disk_usage", lambda path: types.SimpleNamespace(free=100))
        patches.setattr("os.access", lambda path, mode: False)
        code, out, _ = run_tool("doctor.py", tmp_path / "ckpt")
    assert code == 1 and "has 100 bytes left; the largest checkpoint has" in out and "cannot be written to" in out


def test_other_formats_and_other_directories(tmp_path: Path, golden_dir: Path, run_tool: Tool) -> None:
    def answer(place: Path) -> tuple[int, str]:
        code, out, _ = run_tool("doctor.py", place)
        return code, out

    code, out = answer(golden_dir / "ckpt" / "b_iter10_torch")
    assert code == 1 and "is a checkpoint in upstream's torch format" in out and "takes it as it is" in out
    release = tmp_path / "published"
    shutil.copytree(golden_dir / "ckpt" / "b_iter10_torch" / "iter_0000010", release / "release")
    (release / TRACKER_NAME).write_text("release")
    code, out = answer(release)
    assert code == 1 and "published/release is a checkpoint in upstream's torch format" in out and "tracker" not in out
    assert f"--load {release} takes it as it is" in out
    code, out = answer(golden_dir / "ckpt" / "b_iter10_torch_dist")
    assert code == 1 and "in upstream's torch_dist format" in out
    model = tmp_path / "model"
    model.mkdir()
    assert answer(model)[0] == 0
    (model / "config.json").write_text("{}")
    assert answer(model) == (1, answer(model)[1]) and "holds no checkpoint" in answer(model)[1]
    (model / "model-00001-of-00001.safetensors").write_bytes(b"")
    assert "is a model of Hugging Face" in answer(model)[1]
    code, _, err = run_tool("inspect_checkpoint.py", model)
    assert code == 2 and "is a model of Hugging Face, not a checkpoint of a run; training starts from it with" in err
    (tmp_path / "above").mkdir()
    save(tmp_path / "above" / "ckpt", 10)
    assert "above/ckpt does" in answer(tmp_path / "above")[1]
    code, _, err = run_tool("doctor.py", tmp_path / "nowhere")
    assert code == 2 and "nowhere does not exist; give the directory of --save or --load" in err


# ---- average.py


def save_weights(root: Path, iteration: int, value: float, *, main: float | None = None, **changes: Any) -> Path:
    """Weights of this value in bfloat16, where `main` is given with their copy in float32; a table of 3 rows with
    padding; a counter."""
    rows = changes.get("rows", 4)
    tensors = {"w": torch.full((2, 3), value, dtype=torch.bfloat16 if main is not None else torch.float32)}
    tensors |= {"count": torch.tensor(iteration), "scale": torch.tensor(value), **changes.get("more", {})}
    if main is not None:
        tensors["optimizer.state.fp32_param.w"] = torch.full((2, 3), main)
    state = {key: ShardedTensor.whole(key, tensor) for key, tensor in tensors.items()}
    placement = Placement("table", (rows, 2), valid_rows=3)
    state["table"] = ShardedTensor.from_placement(torch.full((rows, 2), value), placement)
    root.mkdir(exist_ok=True)
    document = {"progress": {"iteration": iteration}, "optimizer": {"step": 1}, "scheduler": {}}
    (root / "vocabulary").write_text("words")
    return serialization.save(
        state, root, iteration, documents={"state": document, "config": {"seed": 1}}, group=ALONE,
        attachments={"tokenizer/vocabulary": root / "vocabulary"},
    )  # fmt: skip


def values_of(path: Path) -> dict[str, torch.Tensor]:
    return {tensor.key: tensor.read() for tensor in open_checkpoint(path).tensors}


def test_weights_are_averaged(tmp_path: Path, run_tool: Tool) -> None:
    for iteration, value, rows in ((10, 1.0, 6), (20, 2.0, 4), (30, 6.0, 4)):
        save_weights(tmp_path / "run", iteration, value, rows=rows)
    code, out, err = run_tool("average.py", "--load", tmp_path / "run", "--last", 3, "--save", tmp_path / "mean")
    assert (code, err) == (0, "") and "the average of 3 checkpoints" in out
    found = find(tmp_path / "mean")
    assert found is not None and found.manifest.iteration == 30
    assert (found.path / "tokenizer" / "vocabulary").read_text() == "words"
    values = values_of(found.path)
    assert torch.equal(values["w"], torch.full((2, 3), 3.0)) and values["scale"] == 3
    assert values["count"] == 30, "counters are the newest's"
    assert values["table"].shape == (4, 2) and torch.equal(values["table"][:3], torch.full((3, 2), 3.0))
    state = serialization.read_document(found.path, "state")
    assert state == {"progress": {"iteration": 30}, "optimizer": None, "scheduler": None}
    flags = ["--iterations", 30, 10, "--weights", 3, 1]
    assert run_tool("average.py", "--load", tmp_path / "run", *flags, "--save", tmp_path / "weighted")[0] == 0
    assert values_of(tmp_path / "weighted")["scale"] == (3 * 6 + 1) / 4
    assert serialization.read_document(tmp_path / "weighted" / "iter_0000030", "average") == {
        "iterations": [10, 30], "shares": [0.25, 0.75]
    }  # fmt: skip


def test_average_of_equal_weights_is_the_same_bit_for_bit(tmp_path: Path, run_tool: Tool) -> None:
    tensor = torch.randn(50, generator=torch.Generator().manual_seed(1))
    for iteration in (1, 2, 3):
        save_weights(tmp_path / "run", iteration, 0.1, more={"r": tensor, "h": tensor.bfloat16()})
    assert run_tool("average.py", "--load", tmp_path / "run", "--last", 3, "--save", tmp_path / "mean")[0] == 0
    values = values_of(tmp_path / "mean")
    assert torch.equal(values["r"], tensor) and torch.equal(values["h"], tensor.bfloat16())


def test_sixteen_bit_weights_are_rounded_once(tmp_path: Path, run_tool: Tool) -> None:
    # 1 + 2^-9 lies half-way to the next bfloat16 below 1 + 2^-7: the saved weights are 1, their copies are not.
    for iteration in (1, 2):
        save_weights(tmp_path / "run", iteration, 1.0, main=1 + 2.0**-7 - 2.0**-10)
    assert run_tool("average.py", "--load", tmp_path / "run", "--last", 2, "--save", tmp_path / "mean")[0] == 0
    weight = values_of(tmp_path / "mean")["w"]
    assert weight.dtype == torch.bfloat16 and torch.equal(weight, torch.full((2, 3), 1 + 2.0**-7).bfloat16())
    assert not [key for key in values_of(tmp_path / "mean") if key.startswith("optimizer")]


def test_one_tensor_of_the_sources_is_in_memory_at_a_time(
    tmp_path: Path, run_tool: Tool, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {f"t{index}": torch.ones(3) for index in range(8)}
    for iteration in (1, 2, 3):
        save_weights(tmp_path / "run", iteration, 1.0, more=more)
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0
    read = stored_tensors.BoxReader.read_whole

    def counting(self: Any, key: str) -> torch.Tensor:
        nonlocal most
        tensor = read(self, key)
        alive.add(tensor)
        most = max(most, len(alive))
        return tensor

    monkeypatch.setattr(stored_tensors.BoxReader, "read_whole", counting)
    assert run_tool("average.py", "--load", tmp_path / "run", "--last", 3, "--save", tmp_path / "mean")[0] == 0
    assert 1 <= most <= 3, "of 36 that were read"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--iterations 10 15 --save out", "run holds no iteration 15; saved iterations: 20, 10"),
        ("--iterations 10 10 --save out", "--iterations 10 10: give two or more, each once"),
        ("--last 3 --save out", "--last 3: run holds 2 checkpoints"),
        ("--last 2 --save out --load none", "--load none does not exist; give the directory of the run's checkpoints"),
        ("--last 2 --weights 1 --save out", "--weights has 1 numbers for 2 iterations"),
        ("--last 2 --weights 1 nan --save out", "give finite numbers from 0 on"),
        ("--last 2 --weights 0 0 --save out", "not all of them 0"),
        ("--last 2 --save run", "--save run has iteration 20 already; give another directory"),
        ("--last 2 --save run/vocabulary", "--save run/vocabulary is a file"),
        ("--save out", "one of the arguments --iterations --last is required"),
    ],
)
def test_what_cannot_be_averaged(
    tmp_path: Path, run_tool: Tool, monkeypatch: pytest.MonkeyPatch, flags: str, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    save_weights(tmp_path / "run", 10, 1.0)
    save_weights(tmp_path / "run", 20, 1.0)
    before = sorted(tmp_path.rglob("*"))
    code, out, err = run_tool("average.py", "--load", "run", *flags.split())
    assert (code, out) == (2, "") and sentence in err and err.count("error:") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_checkpoints_of_different_models_and_damaged_ones(tmp_path: Path, run_tool: Tool) -> None:
    save_weights(tmp_path / "run", 10, 1.0, more={"w": torch.ones(3), "x": torch.ones(1)})
    path = save_weights(tmp_path / "run", 20, 1.0, more={"y": torch.ones(1)})
    flags = ["--load", tmp_path / "run", "--last", 2, "--save", tmp_path / "out"]
    code, _, err = run_tool("average.py", *flags)
    assert code == 2 and "checkpoints of different models: y is missing in iter_0000010" in err
    assert "x is in iter_0000010 only" in err and "w is (3,) in iter_0000010, (2, 3) in iter_0000020" in err
    flip_byte(path / "__0_0.distcp")
    code, _, err = run_tool("average.py", *flags)
    assert code == 2 and "__0_0.distcp is damaged" in err and not (tmp_path / "out").exists()


def test_a_run_starts_from_averaged_weights(tmp_path: Path, run_tool: Tool) -> None:
    from tests.support.tiny_training import prepare, train_tiny, values

    train_tiny("--save", tmp_path / "run", "--save-interval", "3")
    assert run_tool("average.py", "--load", tmp_path / "run", "--last", 2, "--save", tmp_path / "mean")[0] == 0
    expected = values_of(tmp_path / "mean")
    finetuned = prepare("--load", tmp_path / "mean", "--finetune")
    continued = prepare("--load", tmp_path / "mean", "--no-load-optim", "--no-load-rng")
    assert (finetuned.progress.iteration, continued.progress.iteration) == (0, 6)
    for run in (finetuned, continued):
        found = {name: value for name, value in values(run) if name in expected}
        assert found.keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in found.items())


# ---- documentation


def documented_commands(program: str) -> list[list[str]]:
    """The arguments of each command that a page quotes."""
    text = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    prefix = f"python tools/checkpoint/{program} "
    return [shlex.split(line.removeprefix(prefix), comments=True) for line in lines if line.startswith(prefix)]


@pytest.mark.parametrize("program", TOOLS)
def test_commands_of_the_page_run(
    program: str, tmp_path: Path, run_tool: Tool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for iteration in (100, 200, 300):
        save_layers(tmp_path / "checkpoints", iteration, scale=iteration, config={"lr": 1}, state={"progress": {}})
    commands = documented_commands(program)
    assert commands
    for arguments in commands:
        code, out, err = run_tool(program, *arguments)
        # What two different checkpoints are compared for is the 1.
        assert (code, err) == (1 if "--diff" in arguments else 0, ""), arguments
        assert out, arguments

"""tools/checkpoint: looking into checkpoints, comparing them, and what is said of directories that are not sound."""

from __future__ import annotations

import io
import json
import math
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.byte_progress import ByteProgress
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.stored_tensors import open_checkpoint
from megatron.core.placement import Piece, Placement
from tests.unit.small_checkpoints import ALONE, save
from tools.checkpoint import inspect_checkpoint
from tools.checkpoint.inspect_checkpoint import build_tree, format_tree

ROOT = Path(__file__).resolve().parents[2]
TOOLS = {"inspect_checkpoint.py": inspect_checkpoint.main}


class Tool:
    """Runs a tool in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, program: str, *arguments: Any) -> tuple[int, str, str]:
        """Exit code, output, errors."""
        self.monkeypatch.setattr(sys, "argv", [program, *map(str, arguments)])
        code = TOOLS[program]()
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
        (["."], "holds no checkpoint in the formats torch_dist or torch"),
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
    code, out, err = run_tool("inspect_checkpoint.py", *arguments)
    assert (code, out) == (2, "") and sentence in err and err.count("error:") == 1


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


# ---- progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["file", "terminal"])
def test_progress_is_quiet_at_first_then_says_rate_and_time_left(stream: io.StringIO) -> None:
    now = 0.0
    progress = ByteProgress("reading", 4_000_000, stream, clock=lambda: now)
    with progress:
        now = 1.9
        progress.add(1_000_000)
        assert stream.getvalue() == ""
        now = 10.0
        progress.add(1_000_000)
        line = stream.getvalue()
        assert " 50%  2.0 MB of 4.0 MB, 200.0 KB/s, 10s left" in line
        assert ("[##########----------]" in line) == line.startswith("\r\x1b[K") == stream.isatty()
        progress.add(1)
        assert stream.getvalue() == line
    assert stream.getvalue().endswith("\r\x1b[K" if stream.isatty() else "\n")


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
        save_layers(tmp_path / "checkpoints", iteration, scale=iteration, config={"lr": 1}, state={"optimizer": {}})
    commands = documented_commands(program)
    assert commands
    for arguments in commands:
        code, out, err = run_tool(program, *arguments)
        # What two different checkpoints are compared for is the 1.
        assert (code, err) == (1 if "--diff" in arguments else 0, ""), arguments
        assert out, arguments

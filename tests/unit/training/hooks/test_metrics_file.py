# SPDX-License-Identifier: Apache-2.0
"""metrics.jsonl: full precision, torn lines, and continuing a file after a restart."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron.cli.heat_map import read_metrics
from megatron.core.errors import ConfigError
from megatron.training.hooks.writers import MetricsFile


def _rows(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def _write(directory: Path, resumed: int, *rows: dict[str, Any]) -> None:
    file = MetricsFile(directory)
    file.open(resumed)
    for row in rows:
        file.write(row)


def test_numbers_keep_every_bit_and_nan_is_null(tmp_path: Path) -> None:
    _write(tmp_path / "new", 0, {"iteration": 1, "lm loss": 0.1 + 0.2, "grad_norm": math.nan})
    assert _rows(tmp_path / "new") == [{"iteration": 1, "lm loss": 0.1 + 0.2, "grad_norm": None}]


def test_each_row_is_on_disk_when_written(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path)
    file.open(0)
    file.write({"iteration": 1})
    assert _rows(tmp_path) == [{"iteration": 1}]


def test_a_resumed_run_continues_without_repeats(tmp_path: Path) -> None:
    _write(tmp_path, 0, *({"iteration": i, "lm loss": i / 7} for i in range(1, 6)), {"iteration": 4, "eval": {}})
    _write(tmp_path, 3, {"iteration": 4}, {"iteration": 5})
    assert [row["iteration"] for row in _rows(tmp_path)] == [1, 2, 3, 4, 5]


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    _write(tmp_path, 0, {"iteration": 1}, {"iteration": 2})
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"iteration": 2, "lm lo')
    _write(tmp_path, 2, {"iteration": 3})
    assert [row["iteration"] for row in _rows(tmp_path)] == [1, 2, 3]


def test_readers_leave_an_unfinished_last_line_out_and_refuse_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, whole = tmp_path / "metrics.jsonl", '{"iteration": 1, "word": "é"}\n{"iteration": 2}'
    expected = [{"iteration": 1, "word": "é"}, {"iteration": 2}]
    for end in ("", "\n"):  # an object that can be read is whole, with or without an end of line
        file.write_text(whole + end, encoding="utf-8")
        assert read_metrics(file) == expected and not capsys.readouterr().err
    torn = f'{whole}\n{{"iteration": 3, "word": "é'.encode()
    for end_bytes in (torn, torn[:-1]):  # also within a character
        file.write_bytes(end_bytes)
        assert read_metrics(file) == expected
        assert capsys.readouterr().err == f"note: {file} ends in an unfinished line, which is left out\n"
    for damaged in (b'{"iteration": 1}\n{"iter\n{"iteration": 3}', b'{"iter\n', b"7\n"):
        file.write_bytes(damaged)
        with pytest.raises(ConfigError, match="is no file of metrics: line [12] is no JSON object"):
            read_metrics(file)


def test_final_evaluations_go_when_the_run_goes_on(tmp_path: Path) -> None:
    regular, final = {"iteration": 2, "eval": {}}, {"iteration": 2, "eval": {}, "final": True}
    _write(tmp_path, 0, {"iteration": 1}, {"iteration": 2}, regular, final)
    _write(tmp_path, 2)
    assert _rows(tmp_path) == [{"iteration": 1}, {"iteration": 2}, regular]


def test_a_fresh_start_sets_an_old_file_aside(tmp_path: Path) -> None:
    _write(tmp_path, 0, {"iteration": 1, "run": "first"})
    _write(tmp_path, 0, {"iteration": 1, "run": "second"})
    assert _rows(tmp_path) == [{"iteration": 1, "run": "second"}]
    assert "first" in (tmp_path / "metrics.jsonl.old").read_text()


def test_an_unusable_directory_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--metrics-dir .*/file cannot be written"):
        MetricsFile(tmp_path / "file").open(0)

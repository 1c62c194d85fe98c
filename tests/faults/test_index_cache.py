# SPDX-License-Identifier: Apache-2.0
"""Damaged, unwritable and contended index caches, by their rows of the fault catalogue (I10 to I14)."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.core.datasets import index_cache
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.index_cache import IndexCache
from tests.faults.small_datasets import build_gpt, write_dataset


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "tiny", [5, 0, 3, 8, 2, 6])


def arrays_of(dataset: Any) -> tuple[Any, ...]:
    return tuple(np.array(a) for a in (dataset.document_index, dataset.sample_index, dataset.shuffle_index))


def assert_equal(first: Any, second: Any) -> None:
    for a, b in zip(arrays_of(first), arrays_of(second), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one entry for each GPTDataset whose indices are computed."""
    log: list[str] = []
    real = GPTDataset._build_indices

    def counted(self: GPTDataset) -> Any:
        log.append(self.index_split.name)
        return real(self)

    monkeypatch.setattr(GPTDataset, "_build_indices", counted)
    return log


def test_I10_cache_that_cannot_be_made(prefix: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(RuntimeWarning, match="the indices stay in memory"):
        train = build_gpt(prefix, tmp_path / "file" / "cache")[0]
    assert_equal(train, build_gpt(prefix, tmp_path / "good")[0])


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root")
def test_I10_cache_that_is_read_only(prefix: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o555)
    with pytest.warns(RuntimeWarning, match="Permission denied"):
        build_gpt(prefix, tmp_path / "cache")


@pytest.mark.parametrize("after", [0, 1, 2])
def test_I10_disk_full(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, builds: list[str], after: int
) -> None:
    """The disk fills at the first, second or third array: one warning, in memory, and no half file is left."""
    calls: list[int] = []
    real = index_cache._write_npy

    def full(file: Any, array: Any) -> None:
        calls.append(1)
        if len(calls) > after:
            file.write(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(file, array)

    with monkeypatch.context() as patched:
        patched.setattr(index_cache, "_write_npy", full)
        with pytest.warns(RuntimeWarning, match="No space left on device") as caught:
            train = build_gpt(prefix, tmp_path / "cache")[0]
    assert len(caught) == 1
    for path in (tmp_path / "cache").iterdir():
        assert ".tmp" not in path.name and b"half" not in path.read_bytes()[:4]
    assert_equal(train, build_gpt(prefix, tmp_path / "cache")[0])
    assert len(builds) == 2  # what was left was not taken for a cache
    build_gpt(prefix, tmp_path / "cache")
    assert len(builds) == 2


FILE_SIZE_LIMIT = """
import resource, sys, warnings
import numpy as np
from megatron.core.datasets.index_cache import IndexCache
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
arrays = IndexCache(sys.argv[1], "x", "y", ("a",)).load_or_build(lambda: {"a": np.arange(10_000)})
assert arrays["a"].sum() == 49995000
"""


def test_I10_file_size_limit(tmp_path: Path) -> None:
    """A real refusal of the kernel in the middle of a file."""
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run(
        [sys.executable, "-c", FILE_SIZE_LIMIT, str(tmp_path)], capture_output=True, text=True, cwd=root
    )
    assert run.returncode == 0, run.stderr
    assert "File too large; the indices stay in memory" in run.stderr
    assert [path.name for path in tmp_path.iterdir() if not path.name.endswith("-lock")] == []


def _build_at_once(start: Any, prefix: str, cache: str, with_locks: bool, results: Any) -> None:
    if not with_locks:
        index_cache._wait_for_lock = lambda descriptor: False
    built = []
    real = GPTDataset._build_indices
    GPTDataset._build_indices = lambda self: built.append(1) or real(self)  # type: ignore[assignment,func-returns-value,method-assign]
    start.wait()
    dataset = build_gpt(Path(prefix), Path(cache))[0]
    results.put((len(built), [zlib.crc32(np.ascontiguousarray(a)) for a in arrays_of(dataset)]))


@pytest.mark.parametrize("with_locks", [True, False], ids=["locks", "no-locks"])
def test_I11_processes_build_the_same_cache_at_once(tmp_path: Path, with_locks: bool) -> None:
    """4 processes x 10 caches: the same indices for all; with locks, exactly one of them computes."""
    fork = multiprocessing.get_context("fork")
    prefix = write_dataset(tmp_path / "data", list(range(1, 300)))
    reference = [zlib.crc32(np.ascontiguousarray(a)) for a in arrays_of(build_gpt(prefix, tmp_path / "reference")[0])]
    for trial in range(10):
        start, results = fork.Barrier(4), fork.Queue()
        cache = tmp_path / f"cache{trial}"
        arguments = (start, str(prefix), str(cache), with_locks, results)
        processes = [fork.Process(target=_build_at_once, args=arguments) for _ in range(4)]
        for process in processes:
            process.start()
        answers = [results.get(timeout=300) for _ in processes]
        for process in processes:
            process.join(300)
        assert [digest for _, digest in answers] == [reference] * 4
        assert not with_locks or sum(built for built, _ in answers) == 1
        assert not [path for path in cache.iterdir() if ".tmp" in path.name]


THIRTY_TWO = """
import os, sys, time, zlib
from pathlib import Path
import numpy as np
from megatron.core.datasets import index_cache

results = Path(sys.argv[2])
(results / f"ready-{os.getpid()}").touch()
while not os.path.exists(sys.argv[3]):
    time.sleep(0.02)
def build():
    (results / f"built-{os.getpid()}").touch()
    if sys.argv[4] == "first dies" and len(list(results.glob("built-*"))) == 1:
        os.kill(os.getpid(), 9)
    time.sleep(0.3)
    return {"a": np.arange(200_000), "b": np.arange(10, dtype=np.int32)}
arrays = index_cache.IndexCache(sys.argv[1], "x", "y", ("a", "b")).load_or_build(build)
(results / f"done-{os.getpid()}").write_text(str(zlib.crc32(arrays["a"].tobytes() + arrays["b"].tobytes())))
"""


@pytest.mark.parametrize("case", ["all live", "first dies"])
def test_I11_I14_thirty_two_processes_on_an_empty_cache_build_it_once(tmp_path: Path, case: str) -> None:
    """Whole programs that share only the directory. If the builder is killed, one other builds: none waits for ever."""
    results, start = tmp_path / "results", tmp_path / "start"
    results.mkdir()
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", THIRTY_TWO, str(tmp_path / "cache"), str(results), str(start), case]
    programs = [subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE, text=True) for _ in range(32)]
    deadline = time.monotonic() + 300
    while len(list(results.glob("ready-*"))) < 32 and time.monotonic() < deadline:
        time.sleep(0.05)
    start.touch()
    codes = [program.wait(timeout=300) for program in programs]
    errors = "".join(program.communicate()[1] for program in programs)
    dies = case == "first dies"
    assert sorted(codes) == ([-signal.SIGKILL] if dies else [0]) + [0] * 31, errors
    assert len(list(results.glob("built-*"))) == 1 + dies
    assert len({path.read_text() for path in results.glob("done-*")}) == 1
    assert not errors and not list((tmp_path / "cache").glob("*.tmp*"))


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _pickled(path: Path) -> None:
    with open(path, "wb") as file:
        np.save(file, np.array([{"an": "object"}], dtype=object), allow_pickle=True)


DAMAGES = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 3),
    "emptied": lambda path: os.truncate(path, 0),
    "flipped": _flip,
    "pickled": _pickled,
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", ["document_index.npy", "sample_index.npy", "shuffle_index.npy", "checksums.json"])
def test_I12_damaged_cache_is_built_again(
    prefix: Path, tmp_path: Path, builds: list[str], damage: str, file: str
) -> None:
    good = build_gpt(prefix, tmp_path / "cache")[0]
    build_gpt(prefix, tmp_path / "cache")
    assert builds == ["train"]  # the second one came from the cache
    wanted = arrays_of(good)
    path = next((tmp_path / "cache").glob(f"*-{file}"))
    del good  # its arrays are maps of the files about to be damaged
    DAMAGES[damage](path)
    repaired = build_gpt(prefix, tmp_path / "cache")[0]
    assert len(builds) == 2
    for a, b in zip(arrays_of(repaired), wanted, strict=True):
        np.testing.assert_array_equal(a, b)
    build_gpt(prefix, tmp_path / "cache")
    assert len(builds) == 2


def test_I12_a_checksum_of_a_pickle_does_not_make_it_loadable(tmp_path: Path) -> None:
    cache = IndexCache(str(tmp_path), "x", "y", ("a",))
    cache.load_or_build(lambda: {"a": np.arange(5)})
    path = next(tmp_path.glob("*-a.npy"))
    _pickled(path)
    sums = next(tmp_path.glob("*-checksums.json"))
    sums.write_text('{"a": [%d, %d]}' % (zlib.crc32(path.read_bytes()), path.stat().st_size))  # noqa: UP031
    assert cache.load() is None


@pytest.mark.parametrize("lengths", [[8, 6, 2, 3, 0, 5], [50, 60]], ids=["same size", "another size"])
def test_I13_replaced_data_is_indexed_again(
    prefix: Path, tmp_path: Path, builds: list[str], lengths: list[int]
) -> None:
    before = build_gpt(prefix, tmp_path / "cache")[0]
    write_dataset(prefix, lengths, seed=1)
    after = build_gpt(prefix, tmp_path / "cache")[0]
    assert len(builds) == 2
    assert_equal(after, build_gpt(prefix, tmp_path / "fresh")[0])
    assert before.unique_description != after.unique_description


DIE_WHILE_BUILDING = """
import os, signal, sys
import numpy as np
from megatron.core.datasets import index_cache
index_cache._checksum = lambda path: os.kill(os.getpid(), signal.SIGKILL)
index_cache.IndexCache(sys.argv[1], "x", "y", ("a",)).load_or_build(lambda: {"a": np.arange(7)})
"""


def test_I14_killed_builder_leaves_no_lock_and_no_file(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run([sys.executable, "-c", DIE_WHILE_BUILDING, str(tmp_path)], capture_output=True, cwd=root)
    assert run.returncode == -signal.SIGKILL, run.stderr
    assert list(tmp_path.glob("*.tmp"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arrays = IndexCache(str(tmp_path), "x", "y", ("a",)).load_or_build(lambda: {"a": np.arange(5)})
    assert arrays["a"].tolist() == [0, 1, 2, 3, 4]
    assert not list(tmp_path.glob("*.tmp*"))


def test_indices_of_many_datasets_are_not_held_in_memory(tmp_path: Path) -> None:
    """Built or found, what is large is a mapping, and the documents of a split are no array."""
    prefixes = [write_dataset(tmp_path / f"data{i}", [5] * 12_000, seed=i) for i in range(3)]
    blend = ([str(prefix) for prefix in prefixes], [1.0, 2.0, 3.0])
    for _ in range(2):
        blended = build_gpt(prefixes[0], tmp_path / "cache", blend=blend, sizes=(30_000, 0, 0))[0]
        for part in [blended, *blended.datasets]:
            held = sum(a.nbytes for a in vars(part).values() if isinstance(a, np.ndarray) and not _is_mapped(a))
            assert held < 1 << 17, (type(part), held)
    assert blended.datasets[0].indices.tolist() == list(range(12_000))


def _is_mapped(array: Any) -> bool:
    return isinstance(array, np.memmap)


MANY_FILES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (600, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
from pathlib import Path
from tests.faults.small_datasets import build_gpt
blend = ([sys.argv[1]] * 400, None)
print(len(build_gpt(Path(sys.argv[1]), Path(sys.argv[2]), blend=blend, sizes=(500, 0, 0))[0].datasets))
"""


def test_I15_a_blend_raises_its_own_limit_of_open_files(prefix: Path, tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", MANY_FILES, str(prefix), str(tmp_path / "cache")]
    run = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert run.stdout.strip() == "400", run.stderr

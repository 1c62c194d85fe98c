# SPDX-License-Identifier: Apache-2.0
"""The bytes of tensors on disk: archives that torch reads, written and read in slices, with checksums on the way."""

from __future__ import annotations

import dataclasses
import io
import math
import time
import weakref
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from megatron.core.dist_checkpointing import checksums, serialization, shard_files
from megatron.core.dist_checkpointing.checksums import (
    combine_crc32,
    compute_checksums,
    join_checksums,
    list_segments,
    take_share,
)
from megatron.core.dist_checkpointing.manifest import DamagedCheckpointError, checksum
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.shard_files import Fill, SavedBox, read_box, write_boxes
from megatron.core.dist_checkpointing.tensor_archives import find_values, render_head, render_tail
from megatron.core.dist_checkpointing.tensor_reading import _Job
from megatron.core.errors import CheckpointError
from megatron.core.upstream_checkpoints.names import read_upstream_tensors
from tests.support.small_checkpoints import ALONE

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64, torch.complex128,
)  # fmt: skip
SHAPES = ((3, 4), (), (7,), (1,), (2, 1, 5), (0,), (0, 3))


def raw(values: torch.Tensor) -> bytes:
    """The bytes of its values, row by row."""
    return values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def make(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(math.prod(shape)).reshape(shape).to(dtype)


def item_of(key: str, values: torch.Tensor) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size([0] * values.dim()), values.shape)
    data = TensorWriteData(chunk, TensorProperties(dtype=values.dtype), values.shape)
    return WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def write(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, SavedBox]:
    """Write a file of boxes, check its record, and return where each box lies."""
    items = [item_of(key, values) for key, values in tensors.items()]
    results, record = write_boxes(path, items, lambda item: tensors[item.index.fqn])
    assert (record.bytes, record.crc32) == (path.stat().st_size, checksum(path))
    places = {result.index.fqn: result.storage_data for result in results}
    assert sum(place.length for place in places.values()) == record.bytes
    return {
        key: SavedBox(places[key].offset, places[key].length, values.dtype, tuple(values.shape))
        for key, values in tensors.items()
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_archive_is_what_torch_saves_and_loads(tmp_path: Path, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        values = make(shape, dtype)
        buffer = io.BytesIO()
        torch.save(values, buffer)
        head = render_head(dtype, shape)
        content = head.content + raw(values) + render_tail(head, zlib.crc32(raw(values)))
        with zipfile.ZipFile(io.BytesIO(content)) as ours, zipfile.ZipFile(buffer) as theirs:
            assert ours.testzip() is None, "checksums of all entries"
            for name in ("data.pkl", "byteorder", "version", "data/0"):
                assert ours.read(f"archive/{name}") == theirs.read(f"archive/{name}"), name
        assert len(head.content) % 64 == 0
        path = tmp_path / "file"
        path.write_bytes(b"before" + content + buffer.getvalue())
        with io.FileIO(path) as file:
            found = find_values(file, 6, len(content), dtype, shape)
            assert found == 6 + len(head.content)
            start = 6 + len(content)
            found = find_values(file, start, len(buffer.getvalue()), dtype, shape)
            assert found is not None, "as torch arranges them"
            file.seek(found)
            assert file.read(values.nbytes) == raw(values)
            for wrong in ((start + 1, dtype, shape), (start, dtype, (*shape, 3)), (6, dtype, (*shape, 3))):
                assert find_values(file, wrong[0], len(buffer.getvalue()), *wrong[1:]) is None
        for source in (io.BytesIO(content), path.with_name("alone")):
            if isinstance(source, Path):
                source.write_bytes(content)
            loaded = torch.load(source, weights_only=True, mmap=isinstance(source, Path))
            assert (loaded.dtype, loaded.shape, loaded.stride()) == (dtype, values.shape, values.stride())
            assert raw(loaded) == raw(values)


def test_an_archive_of_more_than_4_gib_is_a_valid_zip() -> None:
    count = 5 * 2**30
    head = render_head(torch.uint8, (count,))

    class Sparse(io.RawIOBase):
        """The archive with zeros for values, which take no memory."""

        parts = ((0, head.content), (len(head.content) + count, render_tail(head, 0)))
        length, position = len(head.content) + count + len(render_tail(head, 0)), 0

        def seekable(self) -> bool:
            return True

        def tell(self) -> int:
            return self.position

        def seek(self, offset: int, whence: int = 0) -> int:
            self.position = (0, self.position, self.length)[whence] + offset
            return self.position

        def read(self, size: int = -1) -> bytes:
            size = self.length - self.position if size < 0 else min(size, self.length - self.position)
            assert size < 2**20
            data = bytearray(size)
            for start, part in self.parts:
                first, last = max(start, self.position), min(start + len(part), self.position + size)
                if first < last:
                    data[first - self.position : last - self.position] = part[first - start : last - start]
            self.position += size
            return bytes(data)

    with zipfile.ZipFile(Sparse()) as archive:  # type: ignore[arg-type]
        assert archive.getinfo("archive/data/0").file_size == count
        assert archive.read("archive/version") == b"3\n"


@given(st.binary(max_size=50), st.binary(max_size=300))
def test_checksums_of_two_parts_make_that_of_the_whole(first: bytes, second: bytes) -> None:
    assert combine_crc32(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def test_a_long_second_part() -> None:
    zeros = bytes(1 << 20)
    crc32 = zlib.crc32(zeros)
    combined = zlib.crc32(b"x")
    for _ in range(3):
        combined = combine_crc32(combined, crc32, len(zeros))
    assert combined == zlib.crc32(b"x" + 3 * zeros)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shares_of_files_make_up_their_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(checksums, "_SEGMENT_BYTES", 100)
    monkeypatch.setattr(checksums, "_BLOCK_BYTES", 30)
    sizes = {"__10_0.distcp": 1000, "__2_0.distcp": 1000, "config.json": 17, "empty": 0, "tokenizer/a": 99}
    (tmp_path / "tokenizer").mkdir()
    for number, (name, size) in enumerate(sizes.items()):
        (tmp_path / name).write_bytes(bytes(range(number, number + 100)) * 10 if size == 1000 else b"x" * size)
    segments = list_segments(sizes)
    names = [segment.name for segment in segments]
    assert names.index("__2_0.distcp") < names.index("__10_0.distcp"), "2 comes before 10"
    shares = [take_share(segments, index, count) for index in range(count)]
    assert sum(shares, []) == segments
    lengths = [sum(segment.num_bytes for segment in share) for share in shares]
    assert max(lengths) - min(lengths) <= 200, "two segments"
    heard: list[int] = []
    found = sum((compute_checksums(tmp_path, share, heard.append) for share in shares), [])
    assert sum(heard) == sum(sizes.values())
    assert join_checksums(segments, found) == {name: checksum(tmp_path / name) for name, size in sizes.items() if size}


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of a few numbers are then written and read in many pieces, with threads."""
    monkeypatch.setattr(shard_files, "_PIECE_BYTES", 64)
    monkeypatch.setattr(shard_files, "_SHORT_BYTES", 8)
    monkeypatch.setattr(shard_files, "_LARGE_BYTES", 1000)
    monkeypatch.setattr(shard_files, "_FLUSH_BYTES", 100)
    monkeypatch.setattr(shard_files, "_SHORTEST_READ_BYTES", 24)


def parts(shape: tuple[int, ...]) -> list[tuple[slice, ...]]:
    """Regions of a tensor of this shape."""
    whole = tuple(slice(0, size) for size in shape)
    middle = tuple(slice(size // 3, size // 3 + max(1, size // 2)) for size in shape)
    return [whole, middle, *((*whole[:dim], middle[dim], *whole[dim + 1 :]) for dim in range(len(shape)))]


@pytest.mark.usefixtures("short_pieces")
@pytest.mark.parametrize("writer", ["ours", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_parts_of_boxes_are_read_into_tensors_of_any_kind(tmp_path: Path, writer: str, dtype: torch.dtype) -> None:
    tensors = {
        str(shape): make(shape, dtype) for shape in ((), (1,), (100,), (5, 7), (9, 40), (3, 6, 11), (2, 3, 4, 5))
    }
    # Of other memory order, and a part of a larger one: torch.save() would write all of that.
    tensors |= {"turned": make((30, 6), dtype).t(), "column": make((8, 50), dtype)[:, 10:37], "row": make((9, 8))[3:5]}
    path = tmp_path / "boxes"
    if writer == "ours":
        boxes = write(path, tensors)
    else:
        boxes, content = {}, bytearray()
        for key, values in tensors.items():
            buffer = io.BytesIO()
            torch.save(values, buffer)
            boxes[key] = SavedBox(len(content), len(buffer.getvalue()), values.dtype, tuple(values.shape))
            content += buffer.getvalue()
        path.write_bytes(content)
    with io.FileIO(path) as file:
        for key, values in tensors.items():
            for region in parts(tuple(values.shape)):
                expected = values[region]
                offsets = [part.start for part in region]
                for target in (
                    torch.full_like(expected, 7),
                    torch.full(expected.shape, 7.0, dtype=torch.float64),
                    torch.full((*expected.shape, 3), 7, dtype=values.dtype)[..., 1],
                ):
                    read_box(file, boxes[key], offsets, target)
                    assert torch.equal(target, expected.to(target.dtype)), (key, region)


class SlowFile(io.FileIO):
    """A disk that is slower than the thread that feeds it."""

    def write(self, data: Any) -> int:
        time.sleep(0.005)
        return super().write(data)


@pytest.mark.usefixtures("short_pieces")
def test_a_buffer_is_filled_again_only_when_it_has_been_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io, "FileIO", SlowFile)
    # None is a stretch of memory, as none is that lies on a GPU.
    tensors = {str(number): (make((rows, 4)) + 100 * number).t() for number, rows in enumerate([3, 4, 2, 9, 1, 30, 3])}
    boxes = write(tmp_path / "boxes", tensors)
    with io.FileIO(tmp_path / "boxes") as file:
        for key, values in tensors.items():
            target = torch.zeros_like(values)
            read_box(file, boxes[key], (0, 0), target)
            assert torch.equal(target, values), key


def test_a_part_that_is_not_in_the_box_is_refused(tmp_path: Path) -> None:
    boxes = write(tmp_path / "boxes", {"a": make((4, 5))})
    with io.FileIO(tmp_path / "boxes") as file:
        for offsets, shape in (((2, 0), (3, 5)), ((-1, 0), (2, 5)), ((0,), (4,))):
            with pytest.raises(CheckpointError, match=r"the box at byte 0 is \(4, 5\)"):
                read_box(file, boxes["a"], offsets, torch.zeros(shape))


def test_a_file_that_ends_too_early_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "boxes"
    boxes = write(path, {"a": make((400, 5))})
    path.write_bytes(path.read_bytes()[:5000])
    for length, problem in (
        (8832, "has 5000 bytes; its table of contents says 8832"),
        (900, "ends .* bytes too early"),
    ):
        with io.FileIO(path) as file, pytest.raises(CheckpointError, match=problem):
            read_box(file, boxes["a"]._replace(length=length), (0, 0), torch.zeros(400, 5))


def test_what_a_rank_that_does_not_verify_finds_is_told_as_damage(tmp_path: Path) -> None:
    path = tmp_path / "boxes"
    boxes = write(path, {"a": make((4, 5)), "b": make((4, 5))})
    whole = path.read_bytes()
    fill = Fill((0, 0), torch.zeros(4, 5))
    for content, what in (
        (whole.replace(b"PK", b"pk"), "the box at byte 0 cannot be loaded: File is not a zip file"),
        (whole[: boxes["a"].length - 1], f"has {boxes['a'].length - 1} bytes; its table of contents says"),
    ):
        path.write_bytes(content)
        job = _Job(path, 0, boxes["a"], boxes["a"].length, None, [fill], is_unverified=True)
        with pytest.raises(DamagedCheckpointError) as found:
            job.run()
        assert str(found.value).startswith(f"{path} is damaged ({what}") and str(found.value).endswith(")")
        with pytest.raises(CheckpointError) as foreign:
            dataclasses.replace(job, is_unverified=False).run()
        assert not isinstance(foreign.value, DamagedCheckpointError)


@pytest.mark.usefixtures("short_pieces")
def test_tensors_that_are_made_for_writing_are_gone_with_the_next(tmp_path: Path) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def make_values(_: WriteItem) -> torch.Tensor:
        assert all(made() is None for made in alive), "the tensor before is still there"
        values = torch.full((30, 30), float(len(alive)))
        alive.append(weakref.ref(values))
        return values

    items = [item_of(str(number), torch.empty(30, 30, device="meta")) for number in range(5)]
    write_boxes(tmp_path / "boxes", items, make_values)
    assert len(alive) == 5


class CountingFile(io.FileIO):
    """Counts the bytes that are read."""

    count = 0

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer)
        CountingFile.count += count
        return count

    def read(self, size: int | None = -1) -> bytes:  # type: ignore[override]
        content = super().read(-1 if size is None else size)
        CountingFile.count += len(content)
        return content


def test_of_a_stack_only_the_layer_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = torch.randn(16, 40, 50)
    dcp.save({"decoder.layers.mlp.linear_fc2.weight": stack}, checkpoint_id=tmp_path, no_dist=True)
    monkeypatch.setattr(CountingFile, "count", 0)
    monkeypatch.setattr(io, "FileIO", CountingFile)
    layer = ShardedTensor.whole("decoder.layers.3.mlp.linear_fc2.weight", torch.zeros(40, 50))
    read_upstream_tensors(tmp_path, {layer.key: layer}, ALONE, may_have_more=True)
    assert torch.equal(layer.data, stack[3])
    assert 0 < CountingFile.count < 2 * layer.data.nbytes


def test_torch_reads_what_is_saved_here(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(70, 33), "b": torch.randn(5).bfloat16(), "c": torch.tensor(3)}
    state = {key: ShardedTensor.whole(key, values) for key, values in tensors.items()}
    path = serialization.save(state, tmp_path, 4, documents={}, group=ALONE)
    loaded = {key: torch.zeros_like(values) for key, values in tensors.items()}
    dcp.load(loaded, checkpoint_id=path, planner=DefaultLoadPlanner(), no_dist=True)
    dcp_to_torch_save(path, tmp_path / "one.pt")
    whole = torch.load(tmp_path / "one.pt", weights_only=True)
    for key, values in tensors.items():
        assert torch.equal(loaded[key], values) and torch.equal(whole[key], values)

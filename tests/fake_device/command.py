# SPDX-License-Identifier: Apache-2.0
"""Whole programs on the fake device: every line that only a GPU runs is executed, and no number means anything.

    python -m tests.fake_device.command LIBRARY -m benchmarks.gpu_parts versions --out versions.json
    python -m benchmarks gpu --out results --python "python -m tests.fake_device.command LIBRARY"
    FAKE_CUDA=LIBRARY bash tests/run.sh --gpu -p tests.fake_device.command

LIBRARY is what device.build() makes, as `python -m tests.fake_device.command` prints it without arguments. Beside the
operations that recorder.py replaces, what needs values is: batches, the exchange between processes, what a checkpoint
holds, and comparisons of tensors, which look at shapes, number formats and devices only. LEFT_OUT
names the tests that it cannot run, and why.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import runpy
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fake_device import device

LEFT_OUT = {
    "tests/kernels/": "Triton's kernels are compared with references element by element",
    "tests/unit/transformer/test_attention_rounding.py": "how far results are from float64's is counted",
    "tests/unit/transformer/test_cuda_attention.py::test_on_a_gpu": "torch makes no causal bias of a fake tensor",
    "tests/unit/dist_checkpointing/test_async_save.py::test_a_snapshot_of_a_gpu_lies_in_pinned": "no memory is pinned",
}
"""Beginnings of the names of tests that the fake device cannot run, and why."""


def prepare(library: Path) -> None:
    """From now on this process computes on the fake device."""
    device.install(library)
    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron.core import device as device_module
    from tests.fake_device.recorder import Recorder, replace_operations

    replace_operations()
    # A fake tensor cannot be made of one that counts no versions.
    torch.inference_mode = lambda mode=True: torch.no_grad()  # type: ignore[assignment,misc]
    # First: others import names from there.
    _replace_checkpoints()
    _replace_data()
    from benchmarks import curves

    # The CPU's own kernels need values; they run in the tests on the CPU.
    curves._on_cpu = contextlib.nullcontext  # type: ignore[assignment]
    join = dist.init_process_group
    # The store stays real: processes meet and compare their settings before they make groups.
    dist.init_process_group = lambda **given: join(  # type: ignore[assignment]
        "fake", store=FakeStore(), rank=given["rank"], world_size=given["world_size"]
    )
    # What torch says of an H200 without cuDNN: flash attention.
    # It has no form for fake tensors.
    torch._fused_sgd_ = lambda *tensors, **options: None
    torch._fused_sdp_choice = lambda *operands, **options: 1
    torch.cuda.set_sync_debug_mode = lambda mode: None  # type: ignore[assignment]
    # A CPU build cannot watch kernels of a GPU, and says so at every one.
    device_module.list_profiler_activities = lambda: [torch.profiler.ProfilerActivity.CPU]
    torch.testing.assert_close = _assert_alike  # type: ignore[assignment]
    FakeTensorMode(allow_non_fake_inputs=True).__enter__()
    recorder = Recorder().__enter__()
    torch.cuda.memory_allocated = lambda device=None: recorder.live_bytes
    torch.cuda.max_memory_allocated = lambda device=None: recorder.peak_bytes


def _replace_data() -> None:
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.sequences.token_layout import TokenLayout
    from megatron.core.transformer.moe import grouped_products
    from megatron.training.data.loading import TrainingData

    def open_batches(data: Any, split: str, consumed_samples: int, part: int = 0) -> Iterator[dict[str, Any]]:
        with _disable_current_modes():
            sample = {name: torch.as_tensor(value) for name, value in data.datasets[split][0].items()}
        size, place = data.settings.micro_batch_size, data.settings.device
        while True:
            yield {
                name: torch.empty((size, *value.shape), dtype=value.dtype, device=place)
                for name, value in sample.items()
            }

    TrainingData.open = open_batches  # type: ignore[method-assign,assignment]
    # Bounds are read on the host.
    PackedSeqParams.layout = lambda packed, length: TokenLayout.of_documents((0, length // 3, length))  # type: ignore[method-assign]
    grouped_products.grouped_mm_works = lambda widths, dtype, device: dtype == torch.bfloat16  # type: ignore[assignment]
    grouped_products.count_rows = _count_evenly


def _count_evenly(ends: Any) -> list[int]:
    """Rows of each expert, which a real device would tell: as many for each of the caller's rows."""
    found = sys._getframe(1).f_locals
    rows, experts = len(found["x"] if "x" in found else found["rows"]), len(ends)
    return [rows // experts] * (experts - 1) + [rows - rows // experts * (experts - 1)]


def _replace_checkpoints() -> None:
    from megatron.core.dist_checkpointing import serialization
    from megatron.training.checkpoint import restore

    def save(tensors: Any, root: Path, iteration: int, **parts: Any) -> Path:
        path = root / f"iter_{iteration:07d}"
        path.mkdir(parents=True, exist_ok=True)
        (path / "tensors").write_text("\n".join(tensors))
        return path

    def load(run: Any) -> None:
        root = run.config.checkpoint.load
        if root is not None:
            run.progress.iteration = max(int(path.name.removeprefix("iter_")) for path in Path(root).glob("iter_*"))
            run.progress.consumed_train_samples = run.progress.iteration * run.config.training.global_batch_size

    serialization.save = save  # type: ignore[assignment]
    # Before anything imports its name from there.
    restore.load_checkpoint = load


def _assert_alike(actual: Any, expected: Any, **options: Any) -> None:
    """In place of torch.testing.assert_close."""
    import torch

    assert type(actual) is type(expected) or isinstance(actual, torch.Tensor), (actual, expected)
    if not isinstance(actual, torch.Tensor):
        return
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    if options.get("check_dtype", True):
        assert actual.dtype == expected.dtype, (actual.dtype, expected.dtype)
    if options.get("check_device", True):
        assert actual.device == expected.device, (actual.device, expected.device)


def main() -> None:
    """Run what the command line names as Python would: -m MODULE, -c TEXT, or a file."""
    if len(sys.argv) == 1:
        print(device.build(Path(tempfile.mkdtemp(prefix="fake-device-"))))
        return
    library, *words = sys.argv[1:]
    os.environ["FAKE_CUDA"] = library
    prepare(Path(library))
    code = 0
    try:
        _run(words)
    except SystemExit as stop:
        # As the interpreter does: a sentence goes to standard error.
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    device.leave(code)


def _run(words: list[str]) -> None:
    if words[:2] == ["-m", "pytest"]:
        sys.exit(int(pytest.main(words[2:], plugins=[_Tests()])))
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        code = compile(words[1], "-c", "exec")
        runpy._run_code(code, {"__name__": "__main__"})  # type: ignore[attr-defined]
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


class _Tests:
    """What pytest leaves out on the fake device."""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            for start, reason in LEFT_OUT.items():
                if item.nodeid.startswith(start):
                    item.add_marker(pytest.mark.skip(reason=f"not on the fake device: {reason}"))


class _Leaving:
    """pytest's process, too, ends at once, after everything else."""

    exit_code = 0

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self.exit_code = int(exitstatus)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        device.leave(self.exit_code)


def pytest_configure(config: pytest.Config) -> None:
    """Called where pytest loads this module as a plug-in."""
    config.pluginmanager.register(_Tests())
    config.pluginmanager.register(_Leaving())


if __name__ == "__main__":
    main()
elif os.environ.get("FAKE_CUDA"):
    prepare(Path(os.environ["FAKE_CUDA"]))

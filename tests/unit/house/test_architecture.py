# SPDX-License-Identifier: Apache-2.0
"""The building's plan (tests/support/architecture.py), enforced; and the checks themselves, which can fail."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.core.upstream.table import CORE_NAMES
from tests.support.architecture import (
    CHOOSES_MODULES,
    ENTRY_POINTS,
    ENVIRONMENT_READERS,
    FACADE_USERS,
    FACADES,
    MAX_TRAINING_FLOORS,
    MAX_TRAINING_ROOMS,
    MAY_IMPORT,
    MUTABLE_STATE,
    WITHOUT_TORCH,
    WITHOUT_TORCH_AND_NUMPY,
    UnknownRoom,
    _is_version,
    branches_on_device,
    chooses_modules,
    cycles,
    floors,
    forbidden_imports,
    import_cycles,
    imports_of,
    imports_optional,
    mutable_state,
    ours,
    reads_environment,
    room_graphs,
    room_of,
    says_cuda,
)
from tests.support.source_code import ROOT, Source, is_module, parse, sources

# ---- the rules


def test_imports_go_down_only_and_never_across_the_towers() -> None:
    assert forbidden_imports(sources("megatron", *ENTRY_POINTS)) == []


def test_the_plan_itself_has_no_circle() -> None:
    assert cycles({room: set(below) for room, below in MAY_IMPORT.items()}) == []
    rooms = {room_of(source.module) for source in sources("megatron")}
    assert set(MAY_IMPORT) - rooms == set(), "rooms of the plan that do not exist"


def test_no_import_cycles() -> None:
    assert import_cycles(sources("megatron")) == []


def test_no_circles_between_rooms() -> None:
    graphs = room_graphs(sources("megatron"))
    assert {folder: found for folder, graph in graphs.items() if (found := cycles(graph))} == {}


def test_training_is_small_enough_to_walk_through() -> None:
    places = (path for path in (ROOT / "megatron/training").iterdir() if path.name[0] not in "_.")
    # Stubs, and folders of nothing else, describe modules that an import hook makes for users' programs: no rooms.
    rooms = {path.stem for path in places if path.suffix != ".pyi" and (path.is_file() or any(path.rglob("*.py")))}
    assert len(rooms) <= MAX_TRAINING_ROOMS, sorted(rooms)
    assert floors(room_graphs(sources("megatron/training"))["megatron.training"]) <= MAX_TRAINING_FLOORS


def test_inside_megatron_the_defining_module_is_imported() -> None:
    """`from megatron.core.optimizer import X` would load a facade; the version number is the one exception."""
    found = [
        f"{source.relative}:{i.line}: {i.target} ({i.name})"
        for source in sources("megatron")
        if room_of(source.module) != "facade"
        for i in filter(ours, source.imports())
        if (ROOT.joinpath(*i.target.split("."))).is_dir() and not i.target.startswith(source.module + ".")
        if not _is_version(i)
    ]
    assert found == []


def test_nothing_inside_uses_the_facades_for_users() -> None:
    found = [
        f"{source.relative}:{i.line}: {i.target}"
        for source in sources("megatron")
        for i in imports_of(source)
        if ".".join(i.target.split(".")[1:3]) in FACADES
        and source.relative not in FACADE_USERS
        and room_of(source.module) != "facade"
    ]
    assert found == []


def test_imports_name_things_that_exist() -> None:
    found = [
        f"{source.relative}:{i.line}: {i.target}"
        for source in sources("megatron", *ENTRY_POINTS)
        for i in filter(ours, source.imports())
        if not is_module(i.target) and i.target not in CORE_NAMES.defined
    ]
    assert found == []


def test_modules_are_named_where_they_are_imported() -> None:
    files = [s for s in sources("megatron") if s.relative not in CHOOSES_MODULES]
    assert [line for source in files for line in chooses_modules(source)] == []


def test_optional_packages_have_one_door() -> None:
    # A kernel's decorator needs triton when its module is imported; launching.py says who may import one.
    files = [s for s in sources("megatron", "tools") if not s.relative.startswith("megatron/core/kernels/")]
    assert [line for source in files for line in imports_optional(source)] == []
    kernels = [line for source in sources("megatron/core/kernels") for line in imports_optional(source)]
    assert {line.split(": ")[1].split(".")[0] for line in kernels} == {"triton"}
    at_start = {source.module for source in sources("megatron/core/kernels") if imports_optional(source)}
    importers = [i for s in files for i in s.tree.body if isinstance(i, ast.ImportFrom) and i.module in at_start]
    assert importers == []


def test_only_device_says_cuda() -> None:
    # Recordings of what is launched, blocks of memory and links have files of their own.
    own = [f"megatron/core/device{part}.py" for part in ("", "_graphs", "_kernels", "_links", "_memory")]
    files = [s for s in sources("megatron", "tools", "pretrain_gpt.py") if s.relative not in own]
    assert [line for source in files for line in says_cuda(source)] == []


def test_only_device_branches_on_the_kind_of_device() -> None:
    files = [s for s in sources("megatron", "tools", "pretrain_gpt.py") if s.relative != "megatron/core/device.py"]
    assert [line for source in files for line in branches_on_device(source)] == []


def test_only_three_files_and_the_programs_read_the_environment() -> None:
    files = [s for s in sources("megatron") if s.relative not in ENVIRONMENT_READERS and room_of(s.module) != "cli"]
    assert [line for source in files for line in reads_environment(source)] == []


def test_no_argparse_below_training() -> None:
    # convert.py is a program: `python -m megatron.bridge.convert`.
    files = [
        source
        for source in sources("megatron/core", "megatron/planner", "megatron/hf")
        if source.relative != "megatron/hf/convert.py"
    ]
    assert [f"{s.relative}:{i.line}" for s in files for i in s.imports() if i.target == "argparse"] == []


def test_core_keeps_no_state_of_the_process() -> None:
    """But for the facades: what upstream's getters return without arguments is kept there, and read nowhere else."""
    files = [source for source in sources("megatron/core") if room_of(source.module) != "facade"]
    found = {name for source in files for name in mutable_state(source)}
    assert sorted(found - set(MUTABLE_STATE)) == []
    assert sorted(set(MUTABLE_STATE) - found) == [], "exempt for nothing"


def test_megatron_is_a_namespace_package() -> None:
    assert not (ROOT / "megatron" / "__init__.py").exists()


# ---- what may not load torch


def names_of(patterns: list[str]) -> list[str]:
    """The modules a list names; `package.*` stands for all of its modules."""
    names = []
    for pattern in patterns:
        package, star, _ = pattern.partition(".*")
        directory = ROOT.joinpath(*package.split("."))
        names += [package]
        if star:
            names += [s.module for s in sources(directory.relative_to(ROOT).as_posix()) if s.module != package]
    return names


def loaded_by(modules: list[str], heavy: Sequence[str] = ("torch", "numpy")) -> dict[str, list[str]]:
    """Module -> which of the heavy modules its import added, when they are imported one after the other."""
    program = textwrap.dedent(
        """
        import importlib, json, sys
        result, missing = {}, sys.argv[2:]
        for name in json.loads(sys.argv[1]):
            try:
                importlib.import_module(name)
                result[name] = [heavy for heavy in missing if heavy in sys.modules]
            except BaseException as error:
                result[name] = [f"{type(error).__name__}: {error}"]
            missing = [heavy for heavy in missing if heavy not in sys.modules]
        print(json.dumps(result))
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(modules), *heavy],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def test_configs_and_flags_load_neither_torch_nor_numpy() -> None:
    loaded = loaded_by(names_of(WITHOUT_TORCH_AND_NUMPY))
    assert {name: found for name, found in loaded.items() if found} == {}


def test_data_tools_and_tokenizers_do_not_load_torch() -> None:
    loaded = loaded_by(names_of(WITHOUT_TORCH))
    assert {name: found for name, found in loaded.items() if found not in ([], ["numpy"])} == {}


def test_tools_that_take_flags_of_the_tokenizer_do_not_load_the_configs_of_training() -> None:
    # They take most of the time in which such a tool starts.
    configs = ("megatron.training.config.run_groups", "megatron.core.transformer.transformer_config")
    tools = ["megatron.cli.preprocess_data", "megatron.training.flags.argument"]
    loaded = loaded_by([*tools, "megatron.training.flags.parser"], configs)
    assert loaded.pop("megatron.training.flags.parser") == list(configs)
    assert loaded == {name: [] for name in tools}


def test_training_does_not_load_the_compiler() -> None:
    # It takes half as long to import as torch; --compile loads it when it compiles.
    assert loaded_by(["tests.preload"], ["torch", "torch._dynamo"]) == {"tests.preload": ["torch"]}


# ---- the checks themselves can fail


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty repository for the checks to look at."""
    monkeypatch.setattr("tests.support.source_code.ROOT", tmp_path)
    return tmp_path


def written(root: Path, name: str, text: str) -> Source:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return parse(path)


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("megatron/core/mesh.py", "from megatron.core.transformer.mlp import MLP"),
        ("megatron/core/mesh.py", "def f():\n    import megatron.training.step"),
        ("megatron/core/mesh.py", "from megatron.core.dist_checkpointing.mapping import ShardedTensor"),
        ("megatron/core/mesh.py", "import importlib\nimportlib.import_module('megatron.training.step')"),
        ("megatron/core/mesh.py", "import importlib\nx = 1\nimportlib.import_module(f'megatron.training.{x}')"),
        ("megatron/core/optimizer/muon.py", "from megatron.core.models.gpt.gpt_model import GPTModel"),
        ("megatron/core/transformer/mlp.py", "from ..distributed import buckets"),
        ("megatron/core/tensor_parallel/layers.py", "from megatron.core.transformer.mlp import MLP"),
        ("megatron/core/tensor_parallel/products.py", "from megatron.core.models.gpt.gpt_model import GPTModel"),
        ("megatron/core/context_parallel/sharding.py", "from megatron.core.transformer.mlp import MLP"),
        ("megatron/core/pipeline_parallel/executor.py", "from megatron.core.optimizer.muon import Muon"),
        ("megatron/core/tokenizers/null.py", "from megatron.core.distributed.bucket import Bucket"),
        ("megatron/core/transformer/norms.py", "from megatron.core.inference.engine import Engine"),
        ("megatron/planner/memory.py", "from megatron.training.setup import build"),
        ("megatron/training/step.py", "from megatron.training.hooks.console import ConsoleHook"),
        ("megatron/training/config/rng.py", "from megatron.training.hooks.console import ConsoleHook"),
        ("megatron/training/recipes/gpt.py", "from megatron.training.setup import setup"),
    ],
)
def test_forbidden_imports_are_seen(scratch: Path, file: str, line: str) -> None:
    assert len(forbidden_imports([written(scratch, file, line)])) == 1


def test_a_room_that_the_plan_does_not_know_is_seen() -> None:
    for module in ("megatron.training.drawer", "megatron.attic.engine"):
        with pytest.raises(UnknownRoom, match=module):
            room_of(module)


def test_downward_imports_are_fine(scratch: Path) -> None:
    text = "from megatron.core.mesh import RankGrid\nfrom megatron.core.transformer.mlp import MLP\nimport torch\n"
    assert forbidden_imports([written(scratch, "megatron/core/models/gpt/gpt_model.py", text)]) == []
    assert forbidden_imports([written(scratch, "megatron/training/step.py", text)]) == []


def test_modules_chosen_at_run_time_are_seen(scratch: Path) -> None:
    text = "import importlib\ndef f(name):\n    return importlib.import_module(name)\n"
    assert chooses_modules(written(scratch, "megatron/core/x.py", text)) == ["megatron/core/x.py:3"]
    own = 'import importlib\ndef f(name):\n    return importlib.import_module(f"{__name__}.{name}")\n'
    assert chooses_modules(written(scratch, "megatron/core/y/__init__.py", own)) == []


def test_cycles_are_seen(scratch: Path) -> None:
    files = [
        written(scratch, "megatron/core/a.py", "from megatron.core.b import x"),
        written(scratch, "megatron/core/b.py", "def f():\n    from megatron.core.c import y"),
        written(scratch, "megatron/core/c.py", "import megatron.core.a"),
        written(scratch, "megatron/core/d.py", "if TYPE_CHECKING:\n    import megatron.core.e"),
        written(scratch, "megatron/core/e.py", "import megatron.core.d"),
    ]
    assert import_cycles(files) == [
        "megatron.core.a -> megatron.core.b -> megatron.core.c -> megatron.core.a",
        "megatron.core.d -> megatron.core.e -> megatron.core.d",
    ]


def test_circles_between_rooms_are_seen(scratch: Path) -> None:
    files = [
        written(scratch, "megatron/core/transformer/attention.py", "import megatron.core.context_parallel.ring"),
        written(scratch, "megatron/core/context_parallel/ring.py", "import megatron.core.transformer.patterns"),
    ]
    assert import_cycles(files) == []
    assert cycles(room_graphs(files)["megatron.core"]) == ["context_parallel -> transformer -> context_parallel"]


def test_floors_by_example() -> None:
    assert floors({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == 3


@pytest.mark.parametrize(
    "line", ["torch.cuda.synchronize()", "x = t.cuda()", 'd = "cuda"', 'd = "cuda:0"', "from torch.cuda import Event"]
)
def test_cuda_is_seen(scratch: Path, line: str) -> None:
    assert says_cuda(written(scratch, "megatron/core/x.py", line))
    assert not says_cuda(
        written(scratch, "megatron/core/x.py", '"""On cuda."""\nmodel_parallel_cuda_manual_seed = "cuda graphs"')
    )


@pytest.mark.parametrize("line", ["if x.is_cuda: pass", "y = x.is_cpu", 'y = x.device.type == "cpu"', 'd in ("cpu",)'])
def test_branches_on_the_device_are_seen(scratch: Path, line: str) -> None:
    assert branches_on_device(written(scratch, "megatron/core/x.py", line))


@pytest.mark.parametrize("line", ["os.environ['A']", "os.getenv('A')", "from os import environ"])
def test_environment_is_seen(scratch: Path, line: str) -> None:
    assert reads_environment(written(scratch, "megatron/core/x.py", line))


def test_optional_imports_are_seen(scratch: Path) -> None:
    text = (
        "def f():\n    try:\n        import transformer_engine.pytorch as te\n    except ImportError:\n        pass\n"
    )
    assert imports_optional(written(scratch, "megatron/core/x.py", text)) == [
        "megatron/core/x.py:3: transformer_engine.pytorch"
    ]


@pytest.mark.parametrize(
    "text",
    [
        "N = 0\ndef f():\n    global N\n    N = 1\n",
        "CACHE = {}\ndef f(x):\n    CACHE[x] = 1\n",
        "SEEN = set()\ndef f(x):\n    SEEN.add(x)\n",
        "class C:\n    now = None\n    @classmethod\n    def f(cls):\n        cls.now = 1\n",
        "class C:\n    now = None\ndef f():\n    C.now = 1\n",
        "class Tracker:\n    def f(self):\n        self.x = 1\nTRACKER = Tracker()\n",
        "import threading\nSTATE = threading.local()\n",
    ],
)
def test_state_of_the_process_is_seen(scratch: Path, text: str) -> None:
    assert len(mutable_state(written(scratch, "megatron/core/x.py", text))) == 1


def test_constants_and_local_names_are_no_state(scratch: Path) -> None:
    text = "NAMES = {'a': 1}\nITEMS = []\ndef f(ITEMS):\n    ITEMS.append(1)\n    NAMES = {}\n    NAMES['b'] = 2\n"
    assert mutable_state(written(scratch, "megatron/core/x.py", text)) == []

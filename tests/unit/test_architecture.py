"""The building's plan, enforced: imports go down only, in no circle, and each outside thing has one door.

entry points    pretrain_gpt.py  tools/  examples/  benchmarks/
training        megatron/training  megatron/bridge
planner         megatron/planner
inference       megatron/core/inference: the roof that both towers carry
towers          model: models transformer tensor_parallel ...   |   engine: optimizer distributed datasets ...
ground          the other modules of megatron/core
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

import pytest

from megatron.core.optional_deps import OPTIONAL
from megatron.core.upstream.table import CORE_NAMES
from tests.unit.source_code import ROOT, Import, Source, docstrings, dotted, is_module, parse, sources

MODEL_TOWER = {"models", "transformer", "tensor_parallel", "context_parallel", "fusions", "fp8", "fp8_utils"}
ENGINE_TOWER = {
    "optimizer",
    "optimizer_param_scheduler",
    "distributed",
    "pipeline_parallel",
    "datasets",
    "tokenizers",
}
MAY_IMPORT: dict[str, set[str]] = {
    "ground": {"ground"},
    "model tower": {"ground", "model tower"},
    "engine tower": {"ground", "engine tower"},
    "inference": {"ground", "model tower", "engine tower", "inference"},
    "upstream": {"ground", "model tower", "engine tower", "inference", "upstream"},
    "planner": {"ground", "model tower", "engine tower", "planner"},
    "bridge": {"ground", "model tower", "engine tower", "bridge"},
    "training": {"ground", "model tower", "engine tower", "inference", "upstream", "planner", "bridge", "training"},
    "entry point": {
        "ground",
        "model tower",
        "engine tower",
        "inference",
        "upstream",
        "planner",
        "bridge",
        "training",
        "entry point",
    },
}
ENTRY_POINTS = ("pretrain_gpt.py", "tools", "examples", "benchmarks")

ENVIRONMENT_READERS = {
    "megatron/training/launch/initialize.py": "the launcher's variables",
    "megatron/core/device.py": "MEGATRON_DEVICE and LOCAL_RANK",
    "megatron/core/errors.py": "MEGATRON_TRACEBACK",
}
FACADES = {"megatron.core.parallel_state", "megatron.training.global_vars", "megatron.training.arguments"}
FACADE_USERS = {"megatron/core/__init__.py", "megatron/training/__init__.py", "megatron/training/launch/initialize.py"}

WITHOUT_TORCH_AND_NUMPY = [
    "megatron.core",
    "megatron.core.config_base",
    "megatron.core.enums",
    "megatron.core.errors",
    "megatron.core.mesh",
    "megatron.core.model_parallel_config",
    "megatron.core.optional_deps",
    "megatron.core.distributed.distributed_data_parallel_config",
    "megatron.core.optimizer.optimizer_config",
    "megatron.core.transformer.transformer_config",
    "megatron.core.transformer.config_fields.*",
    "megatron.training.config.*",
    "megatron.training.flags.declarations",
    "megatron.training.flags.read",
]
WITHOUT_TORCH = [
    "megatron.core.datasets.blend",
    "megatron.core.datasets.blending_order",
    "megatron.core.datasets.index_builders",
    "megatron.core.datasets.indexed_dataset",
    "megatron.core.num_microbatches_calculator",
    "megatron.core.placement",
    "megatron.core.tokenizers.*",
    "tools.preprocess_data",
    "tools.verify_tokenization",
    "tools.list_flags",
]


def is_facade(module: str) -> bool:
    return module in FACADES or module.startswith(("megatron.core.upstream", "megatron.training.upstream"))


def floor_of(module: str) -> str:
    """The floor or tower a module of this repository belongs to."""
    parts = module.split(".")
    if parts[0] != "megatron":
        return "entry point"
    if len(parts) > 1 and parts[1] in ("training", "bridge", "planner"):
        return parts[1]
    room = parts[2] if len(parts) > 2 else ""
    if module == "megatron.core":
        return "upstream"  # the package itself re-exports public names
    if room in ("inference", "upstream"):
        return room
    return "model tower" if room in MODEL_TOWER else "engine tower" if room in ENGINE_TOWER else "ground"


def ours(imported: Import) -> bool:
    return imported.target.split(".")[0] == "megatron"


def upward_imports(files: Iterable[Source]) -> list[str]:
    found = []
    for source in files:
        floor = floor_of(source.module)
        for imported in filter(ours, source.imports()):
            if floor_of(imported.target) not in MAY_IMPORT[floor]:
                target = floor_of(imported.target)
                found.append(f"{source.relative}:{imported.line}: {floor} imports {imported.target} ({target})")
    return found


def import_cycles(files: Iterable[Source]) -> list[list[str]]:
    """Circles among modules, counting imports inside functions but not those for type checkers only."""
    graph = {s.module: {i.target for i in s.imports() if ours(i) and not i.only_types} for s in files}
    cycles: list[list[str]] = []
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            cycles.append([*path[path.index(module) :], module])
            return
        if module in done:
            return
        for target in sorted(graph.get(module, ())):
            if target != module:
                visit(target, [*path, module])
        done.add(module)

    for module in sorted(graph):
        visit(module, [])
    return cycles


def says_cuda(source: Source) -> list[str]:
    """Places that name CUDA devices or torch.cuda; words in documentation do not count."""
    texts = docstrings(source.tree)
    found = []
    for node in ast.walk(source.tree):
        attribute = isinstance(node, ast.Attribute) and node.attr == "cuda"
        literal = (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in texts
            and re.fullmatch(r"cuda(:\d*)?", node.value) is not None
        )
        if attribute or literal:
            found.append(f"{source.relative}:{node.lineno}")
    found += [f"{source.relative}:{i.line}" for i in source.imports() if (i.target + ".").startswith("torch.cuda.")]
    return found


def reads_environment(source: Source) -> list[str]:
    names = {"os.environ", "os.getenv", "os.putenv", "os.environb"}
    return [f"{source.relative}:{node.lineno}" for node in ast.walk(source.tree) if dotted(node) in names] + [
        f"{source.relative}:{i.line}" for i in source.imports() if i.target == "os" and i.name in ("environ", "getenv")
    ]


def imports_optional(source: Source) -> list[str]:
    return [
        f"{source.relative}:{i.line}: {i.target}"
        for i in source.imports()
        if i.target.split(".")[0] in OPTIONAL and not i.only_types
    ]


# ---- the rules


def test_imports_go_down_only_and_never_across_the_towers() -> None:
    assert upward_imports(sources("megatron", *ENTRY_POINTS)) == []


def test_no_import_cycles() -> None:
    assert [" -> ".join(cycle) for cycle in import_cycles(sources("megatron"))] == []


def test_inside_megatron_the_defining_module_is_imported() -> None:
    """`from megatron.core.optimizer import X` would load a facade; the version number is the one exception."""
    found = [
        f"{source.relative}:{i.line}: {i.target} ({i.name})"
        for source in sources("megatron")
        for i in filter(ours, source.imports())
        if (ROOT.joinpath(*i.target.split("."))).is_dir() and not i.target.startswith(source.module + ".")
        if (i.target, i.name) != ("megatron.core", "__version__")
    ]
    assert found == []


def test_nothing_inside_uses_the_facades_for_users() -> None:
    found = [
        f"{source.relative}:{i.line}: {i.target}"
        for source in sources("megatron")
        for i in source.imports()
        if is_facade(i.target) and source.relative not in FACADE_USERS and not is_facade(source.module)
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


def test_optional_packages_have_one_door() -> None:
    assert [line for source in sources("megatron", "tools") for line in imports_optional(source)] == []


def test_only_device_says_cuda() -> None:
    files = [s for s in sources("megatron", "tools", "pretrain_gpt.py") if s.relative != "megatron/core/device.py"]
    assert [line for source in files for line in says_cuda(source)] == []


def test_only_three_files_read_the_environment() -> None:
    files = [s for s in sources("megatron") if s.relative not in ENVIRONMENT_READERS]
    assert [line for source in files for line in reads_environment(source)] == []


def test_no_argparse_below_training() -> None:
    files = sources("megatron/core", "megatron/planner", "megatron/bridge")
    assert [f"{s.relative}:{i.line}" for s in files for i in s.imports() if i.target == "argparse"] == []


def test_no_global_statements_in_core() -> None:
    found = [
        f"{s.relative}:{n.lineno}" for s in sources("megatron/core") for n in ast.walk(s.tree) if type(n) is ast.Global
    ]
    assert found == []


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


def loaded_by(modules: list[str]) -> dict[str, list[str]]:
    """Module -> which of torch and numpy it had loaded, importing each in its own fresh interpreter state."""
    program = textwrap.dedent(
        """
        import importlib, json, os, sys
        result = {}
        for name in json.loads(sys.argv[1]):
            read, write = os.pipe()
            child = os.fork()
            if child == 0:
                try:
                    importlib.import_module(name)
                    found = [heavy for heavy in ("torch", "numpy") if heavy in sys.modules]
                except BaseException as error:
                    found = [f"{type(error).__name__}: {error}"]
                os.write(write, json.dumps(found).encode())
                os._exit(0)
            os.close(write)
            result[name] = json.loads(os.fdopen(read).read())
            os.waitpid(child, 0)
        print(json.dumps(result))
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(modules)],
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


# ---- the checks themselves can fail


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty repository for the checks to look at."""
    monkeypatch.setattr("tests.unit.source_code.ROOT", tmp_path)
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
        ("megatron/core/optimizer/muon.py", "from megatron.core.models.gpt.gpt_model import GPTModel"),
        ("megatron/core/transformer/mlp.py", "from ..distributed import buckets"),
        ("megatron/core/transformer/rotary.py", "from megatron.core.inference.engine import Engine"),
        ("megatron/planner/memory.py", "from megatron.training.setup import build"),
    ],
)
def test_upward_imports_are_seen(scratch: Path, file: str, line: str) -> None:
    assert len(upward_imports([written(scratch, file, line)])) == 1


def test_downward_imports_are_fine(scratch: Path) -> None:
    text = "from megatron.core.mesh import RankGrid\nfrom megatron.core.transformer.mlp import MLP\nimport torch\n"
    assert upward_imports([written(scratch, "megatron/core/models/gpt/gpt_model.py", text)]) == []
    assert upward_imports([written(scratch, "megatron/training/step.py", text)]) == []


def test_cycles_are_seen(scratch: Path) -> None:
    files = [
        written(scratch, "megatron/core/a.py", "from megatron.core.b import x"),
        written(scratch, "megatron/core/b.py", "def f():\n    from megatron.core.c import y"),
        written(scratch, "megatron/core/c.py", "import megatron.core.a"),
        written(scratch, "megatron/core/d.py", "if TYPE_CHECKING:\n    import megatron.core.e"),
        written(scratch, "megatron/core/e.py", "import megatron.core.d"),
    ]
    assert import_cycles(files) == [["megatron.core.a", "megatron.core.b", "megatron.core.c", "megatron.core.a"]]


@pytest.mark.parametrize(
    "line", ["torch.cuda.synchronize()", "x = t.cuda()", 'd = "cuda"', 'd = "cuda:0"', "from torch.cuda import Event"]
)
def test_cuda_is_seen(scratch: Path, line: str) -> None:
    assert says_cuda(written(scratch, "megatron/core/x.py", line))
    assert not says_cuda(
        written(scratch, "megatron/core/x.py", '"""On cuda."""\nmodel_parallel_cuda_manual_seed = "cuda graphs"')
    )


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

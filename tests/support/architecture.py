# SPDX-License-Identifier: Apache-2.0
"""The building's plan, enforced: imports go down only, in no circle, and each outside thing has one door.

    entry points    pretrain_gpt.py  tools/  examples/  benchmarks/
    programs        megatron/cli, megatron/__main__.py: what the entry points start
    hf              megatron/hf: models from and to Hugging Face directories
    training        megatron/training, room above room (TRAINING_ROOMS)
    planner         megatron/planner
    inference       megatron/core/inference: the roof that both towers carry
    towers          model: models transformer tensor_parallel ...   |   engine: optimizer distributed datasets ...
    ground          plan, upstream_checkpoints, dist_checkpointing, kernels, and the single modules of megatron/core

A room is a folder, or a file that stands beside folders. MAY_IMPORT says for each room which others it may use; a room
that it does not know is an error, so that nobody adds one without deciding where it belongs.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping

from megatron.core.optional_deps import OPTIONAL
from tests.support.source_code import ROOT, Import, Source, docstrings, dotted

KERNELS = (
    "core.kernels", "core.operation_table", "core.activations", "core.fp8", "core.fp4", "core.scaled_products"
)  # fmt: skip
"""GPU kernels, and the modules of the ground that use them."""
GROUND = ("core", "core.sequences", "core.plan", "core.dist_checkpointing", "core.upstream_checkpoints", *KERNELS)
MODEL_TOWER = ("core.context_parallel", "core.tensor_parallel", "core.transformer", "core.ssm", "core.models")
ENGINE_TOWER = (
    "core.tokenizers",
    "core.datasets",
    "core.distributed",
    "core.optimizer",
    "core.pipeline_parallel",
    "core.many_sites",
    "core.post_training",
)
TRAINING_ROOMS = (
    "training.config",
    "training.metrics",
    "training.data",
    "training.recipes",
    "training.run",
    "training.step",
    "training.checkpoint",
    "training.flags",
    "training.launch",
    "training.rerun",
    "training.loop",
    "training.hooks",
    "training.setup",
    "training.current_run",
    "training.verify",
    "training.training",
)
"""From the lowest to the highest: each may import those before it."""

MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "core": ("core.sequences",),
    "core.sequences": (),
    "core.plan": ("core",),
    "core.dist_checkpointing": ("core",),
    "core.upstream_checkpoints": ("core", "core.plan", "core.dist_checkpointing"),
    "core.kernels": ("core",),
    "core.activations": ("core", "core.kernels"),
    "core.fp8": ("core", "core.kernels"),
    "core.fp4": ("core", "core.kernels", "core.fp8"),
    "core.scaled_products": ("core", "core.kernels", "core.fp8", "core.fp4"),
    "core.operation_table": ("core", "core.kernels"),
    "core.context_parallel": ("core",),
    "core.tensor_parallel": ("core", *KERNELS),
    "core.transformer": (*GROUND, "core.context_parallel", "core.tensor_parallel"),
    "core.ssm": (*GROUND, "core.context_parallel", "core.tensor_parallel", "core.transformer"),
    "core.models": (*GROUND, "core.context_parallel", "core.tensor_parallel", "core.transformer", "core.ssm"),
    "core.tokenizers": ("core",),
    "core.datasets": ("core", "core.tokenizers"),
    "core.distributed": ("core",),
    "core.optimizer": ("core", "core.distributed", "core.dist_checkpointing", "core.kernels"),
    "core.pipeline_parallel": ("core",),
    "core.post_training": ("core",),
    "core.many_sites": ("core", "core.dist_checkpointing", "core.optimizer"),
    "core.inference": (*GROUND, *MODEL_TOWER, *ENGINE_TOWER),
    "planner": (*GROUND, *MODEL_TOWER, *ENGINE_TOWER),
}
for _index, _room in enumerate(TRAINING_ROOMS):
    MAY_IMPORT[_room] = (*GROUND, *MODEL_TOWER, *ENGINE_TOWER, "core.inference", "planner", *TRAINING_ROOMS[:_index])
MAY_IMPORT["hf"] = (
    *GROUND, *MODEL_TOWER, "core.distributed", "training.config", "training.recipes", "training.run",
    "training.checkpoint", "training.flags",
)  # fmt: skip
MAY_IMPORT["cli"] = (
    *GROUND,
    *MODEL_TOWER,
    *ENGINE_TOWER,
    "core.inference",
    "planner",
    *TRAINING_ROOMS,
    "hf",
    "serving",
    "report",
)
MAY_IMPORT["serving"] = (*GROUND, "core.tokenizers", "core.inference")
MAY_IMPORT["report"] = ("core", "core.pipeline_parallel")
MAY_IMPORT["bridge"] = ("hf",)  # the doors under the name that users' documents have
MAY_IMPORT["__main__"] = ("cli",)
ENTRY_POINTS = ("pretrain_gpt.py", "tools", "examples", "benchmarks")
FACADES = (
    "core.extensions", "core.package_info", "core.parallel_state", "core.upstream", "training.arguments",
    "training.global_vars", "training.upstream",
)  # fmt: skip
"""Modules that give users' programs upstream's names: they may import what they hand on, and nobody imports them."""
FACADE_USERS = {"megatron/core/__init__.py", "megatron/training/__init__.py", "megatron/training/launch/initialize.py"}
MAX_TRAINING_ROOMS = 20
MAX_TRAINING_FLOORS = 9

ENVIRONMENT_READERS = {
    "megatron/training/launch/initialize.py": "the launcher's variables, MEGATRON_CRASH_POINT",
    "megatron/core/device.py": "MEGATRON_DEVICE and LOCAL_RANK",
    "megatron/core/errors.py": "MEGATRON_TRACEBACK",
    "megatron/cli/serve.py": "MEGATRON_API_KEY: a command line is seen by all users of a machine",
}
CHOOSES_MODULES = {
    "megatron/core/operation_table.py": "its rows say where the code of each way is",
    "megatron/core/kernels/launching.py": "a function says which kernel stands for it",
    "megatron/core/optional_deps.py": "the one door of optional packages",
    "megatron/core/__init__.py": "its table of names says where each is defined",
    "megatron/core/lazy_names.py": "tables of names say where each is defined",
    "megatron/core/upstream/names.py": "its tables of names say where each is defined",
    "megatron/core/transformer/spec_utils.py": "import_module() is one of upstream's names",
    "megatron/cli/commands.py": "its table of programs says where each is",
    "megatron/hf/own_family.py": "--family names a file of the user's own",
    "megatron/training/recipes/gpt.py": "--spec names a module of the user's own",
}
"""Files that import a module whose name is only known at run time."""
MUTABLE_STATE: dict[str, str] = {
    "megatron/core/dist_checkpointing/crash_points.py:_ARMED": (
        "what dies at a crash point is the process, wherever in a save it is; empty but in tests of crashes"
    ),
    "megatron/core/plan/kinds.py:_KINDS": (
        "which kinds of layers a program has, its own ones included, is the same for every config that it makes"
    ),
    "megatron/core/process_groups_config.py:ProcessGroupCollection._current": (
        "what upstream's constructors without groups mean; only the outermost constructors ask for it"
    ),
    "megatron/core/tensor_parallel/kept_activations.py:_RULES": (
        "the blocks that are open on this thread, as torch keeps its own hooks for saved tensors; empty outside of them"
    ),
    "megatron/core/tensor_parallel/offloaded_activations.py:_PASS": (
        "the forward pass that is open on this thread, like the blocks that say how its activations wait for backward"
    ),
    "megatron/core/tensor_parallel/random.py:_TRACKER": (
        "random streams belong to the process, as torch's generators do; get_cuda_rng_tracker() hands them out"
    ),
}
"""file:name in megatron/core -> why this state of the process may stand at module or class level."""

WITHOUT_TORCH_AND_NUMPY = [
    "megatron.core",
    "megatron.core.config_base",
    "megatron.core.datasets.blend",
    "megatron.core.enums",
    "megatron.core.errors",
    "megatron.core.mesh",
    "megatron.core.model_parallel_config",
    "megatron.core.optional_deps",
    "megatron.core.plan.*",
    "megatron.core.distributed.distributed_data_parallel_config",
    "megatron.core.optimizer.optimizer_config",
    "megatron.core.transformer.transformer_config",
    "megatron.core.transformer.config_fields.*",
    "megatron.training.config.*",
    "megatron.training.flags.*",
]
WITHOUT_TORCH = [
    "megatron.core.datasets.blending_order",
    "megatron.core.datasets.index_builders",
    "megatron.core.datasets.indexed_dataset",
    "megatron.core.num_microbatches_calculator",
    "megatron.core.placement",
    "megatron.core.tokenizers.*",
    "megatron.cli.commands",
    "megatron.cli.preprocess_data",
    "megatron.cli.verify_tokenization",
    "tools.preprocess_data",
    "tools.verify_tokenization",
    "tools.list_flags",
]


class UnknownRoom(AssertionError):
    """A module stands where the plan has no room."""


def room_of(module: str) -> str:
    """The room of a module of this repository: "core.optimizer", "training.hooks", "facade" or "entry point"."""
    parts = module.split(".")
    if parts[0] != "megatron":
        return "entry point"
    inside = parts[1:]
    if ".".join(inside[:2]) in FACADES:
        return "facade"
    if len(inside) == 1 and inside[0] in ("core", "training"):
        return "facade"  # the package itself: its __init__ hands names on
    for length in (2, 1):
        name = ".".join(inside[:length])
        if name in MAY_IMPORT and not (name == "core" and _is_folder(parts[:3])):
            return name
    raise UnknownRoom(f"{module}: MAY_IMPORT has no such room; decide what it may import")


def _is_folder(parts: list[str]) -> bool:
    return len(parts) == 3 and (ROOT.joinpath(*parts)).is_dir()


def ours(imported: Import) -> bool:
    return imported.target.split(".")[0] == "megatron"


def imports_of(source: Source) -> Iterator[Import]:
    """The imports of our modules: statements, and calls of importlib.import_module with a name that stands there."""
    # For type checkers alone a file may say which of upstream's names it also has; the facades' tables find them.
    yield from (i for i in source.imports() if ours(i) and not (i.only_types and room_of(i.target) == "facade"))
    for node in source.nodes:
        if isinstance(node, ast.Call) and dotted(node.func).endswith("import_module") and node.args:
            target = _written_name(node.args[0])
            if target.split(".")[0] == "megatron":
                yield Import(target, node.lineno)


def _written_name(argument: ast.expr) -> str:
    """The constant beginning of a module name: "megatron.training." of f"megatron.training.{name}"."""
    if isinstance(argument, ast.JoinedStr) and argument.values:
        argument = argument.values[0]  # type: ignore[assignment]
    return argument.value.rstrip(".") if isinstance(argument, ast.Constant) and isinstance(argument.value, str) else ""


def chooses_modules(source: Source) -> list[str]:
    """Places that import a module whose name is not written there. A package may hand on its own children."""
    found = []
    for node in source.nodes:
        if not (
            isinstance(node, ast.Call) and dotted(node.func).endswith(("import_module", "__import__")) and node.args
        ):
            continue
        argument = node.args[0]
        own_child = isinstance(argument, ast.JoinedStr) and ast.unparse(argument).startswith("f'{__name__}.")
        if not (_written_name(argument) or own_child):
            found.append(f"{source.relative}:{node.lineno}")
    return found


def forbidden_imports(files: Iterable[Source]) -> list[str]:
    """Imports that go up, across the towers, or to a room beside that the plan does not allow."""
    found = []
    for source in files:
        room = room_of(source.module)
        if room in ("facade", "entry point"):
            continue
        for imported in imports_of(source):
            target = room_of(imported.target)
            if target not in (room, *MAY_IMPORT[room]) and not _is_version(imported):
                found.append(f"{source.relative}:{imported.line}: {room} imports {imported.target} ({target})")
    return found


def _is_version(imported: Import) -> bool:
    return (imported.target, imported.name) == ("megatron.core", "__version__")


def cycles(graph: Mapping[str, set[str]]) -> list[str]:
    """Circles of a directed graph, each once, as "a -> b -> a"."""
    found: list[str] = []
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> None:
        if node in path:
            found.append(" -> ".join([*path[path.index(node) :], node]))
            return
        if node in done:
            return
        for target in sorted(graph.get(node, ())):
            if target != node:
                visit(target, [*path, node])
        done.add(node)

    for node in sorted(graph):
        visit(node, [])
    return found


def import_cycles(files: Iterable[Source]) -> list[str]:
    """Circles among modules, counting imports inside functions and those for type checkers only."""
    return cycles({s.module: {i.target for i in imports_of(s)} for s in files})


def room_graphs(files: Iterable[Source]) -> dict[str, dict[str, set[str]]]:
    """For each folder: which of its children, files and folders, imports which. Left out: what only hands on names."""
    graphs: dict[str, dict[str, set[str]]] = {}
    for source in files:
        if source.path.name == "__init__.py" or room_of(source.module) == "facade":
            continue
        own = source.module.split(".")
        for imported in imports_of(source):
            other = imported.target.split(".")
            shared = next((n for n, (a, b) in enumerate(zip(own, other, strict=False)) if a != b), None)
            if shared is None:
                continue
            graphs.setdefault(".".join(own[:shared]), {}).setdefault(own[shared], set()).add(other[shared])
    return graphs


def floors(graph: Mapping[str, set[str]]) -> int:
    """The longest chain of imports."""

    assert cycles(graph) == []

    def height(node: str) -> int:
        return 1 + max((height(target) for target in graph.get(node, ()) if target != node), default=0)

    return max(map(height, graph), default=0)


def says_cuda(source: Source) -> list[str]:
    """Places that name CUDA devices or torch.cuda; words in documentation do not count."""
    texts = docstrings(source.tree)
    found = []
    for node in source.nodes:
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


def branches_on_device(source: Source) -> list[str]:
    """Places that ask a tensor or a device of what kind it is; only device.py knows what follows from that."""
    found = []
    for node in source.nodes:
        asks_tensor = isinstance(node, ast.Attribute) and node.attr in ("is_cuda", "is_cpu")
        if asks_tensor and dotted(node).startswith(("device.is_", "device_module.is_")):
            continue  # the functions of device.py
        compares = isinstance(node, ast.Compare) and any(map(_is_device_kind, (node.left, *node.comparators)))
        if asks_tensor or compares:
            found.append(f"{source.relative}:{node.lineno}")
    return found


def _is_device_kind(node: ast.expr) -> bool:
    return any(
        isinstance(part, ast.Constant) and part.value in ("cpu", "cuda", "xpu", "mps") for part in ast.walk(node)
    )


def reads_environment(source: Source) -> list[str]:
    names = {"os.environ", "os.getenv", "os.putenv", "os.environb"}
    return [f"{source.relative}:{node.lineno}" for node in source.nodes if dotted(node) in names] + [
        f"{source.relative}:{i.line}" for i in source.imports() if i.target == "os" and i.name in ("environ", "getenv")
    ]


def imports_optional(source: Source) -> list[str]:
    return [
        f"{source.relative}:{i.line}: {i.target}"
        for i in source.imports()
        if i.target.split(".")[0] in OPTIONAL and not i.only_types
    ]


_CONTAINER_CALLS = ("dict", "list", "set", "defaultdict", "OrderedDict", "deque", "Counter", "ContextVar", "local")
_CHANGES = ("append", "extend", "add", "update", "pop", "popitem", "clear", "insert", "remove", "setdefault", "set")


def mutable_state(source: Source) -> list[str]:
    """Names at module or class level that functions of the file change: rebound with `global`, assigned as an attribute
    of a class, filled as a container; and instances of the file's own classes, whose methods may change them."""
    own_classes = {node.name for node in source.tree.body if isinstance(node, ast.ClassDef)}
    names: dict[str, int] = {}
    found: dict[str, int] = {}
    for node in source.tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        value = getattr(node, "value", None)
        for target in targets:
            if isinstance(target, ast.Name):
                names[target.id] = node.lineno
                called = dotted(value.func).split(".")[-1] if isinstance(value, ast.Call) else ""
                if called in own_classes - _frozen(source.tree) or called in ("ContextVar", "local"):
                    found[target.id] = node.lineno
    for function in source.nodes:
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Global):
                found |= dict.fromkeys(node.names, node.lineno)
            for target in _assigned(node):
                base = dotted(target.value) if isinstance(target, ast.Attribute | ast.Subscript) else ""
                if base in own_classes or base == "cls":
                    found[f"{base}.{getattr(target, 'attr', '[]')}"] = node.lineno
                elif base in names and base not in _locals(function):
                    found[base] = node.lineno
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES:
                base = dotted(node.func.value)
                if base in names and base not in _locals(function):
                    found[base] = node.lineno
    return [f"{source.relative}:{name}" for name in found]


def _frozen(tree: ast.Module) -> set[str]:
    """Classes whose instances cannot change: frozen dataclasses, named tuples, enums."""
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        and ("frozen=True" in " ".join(map(ast.unparse, node.decorator_list))
             or any(dotted(base).split(".")[-1] in ("NamedTuple", "Enum") for base in node.bases))
    }  # fmt: skip


def _assigned(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else []


def _locals(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Names that the function binds itself."""
    arguments = function.args
    bound = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    return bound | {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}

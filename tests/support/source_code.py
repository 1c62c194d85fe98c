# SPDX-License-Identifier: Apache-2.0
"""The repository's Python files, parsed, for the tests that look at the code itself."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Import:
    """One imported module, as the full dotted name of a module or package."""

    target: str
    line: int
    name: str | None = None
    """What is taken from it, when that is no module of its own."""
    only_types: bool = False
    """Inside `if TYPE_CHECKING:`."""


@dataclass(frozen=True, eq=False)
class Source:
    """One file."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def relative(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @property
    def module(self) -> str:
        """Dotted name; a package for its __init__.py."""
        parts = self.relative.removesuffix(".py").split("/")
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def package(self) -> str:
        """The package that relative imports start from."""
        return self.module if self.path.name == "__init__.py" else self.module.rpartition(".")[0]

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        """The tree's nodes, found once for all the tests that look through them."""
        return list(ast.walk(self.tree))

    @functools.cache  # noqa: B019 (a source lives as long as the tests)
    def imports(self) -> tuple[Import, ...]:
        """Every import statement of the file, wherever it stands."""
        types_only = {id(node) for block in _type_checking_blocks(self.nodes) for node in ast.walk(block)}
        found: list[Import] = []
        for node in self.nodes:
            hidden = id(node) in types_only
            if isinstance(node, ast.Import):
                found += [Import(alias.name, node.lineno, None, hidden) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = self._absolute(node)
                for alias in node.names:
                    module = f"{base}.{alias.name}"
                    if is_module(module):
                        found.append(Import(module, node.lineno, None, hidden))
                    else:
                        found.append(Import(base, node.lineno, alias.name, hidden))
        return tuple(found)

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.package.split(".")
        base = parts[: len(parts) - node.level + 1]
        return ".".join([*base, *([node.module] if node.module else [])])


@functools.cache
def sources(*places: str) -> tuple[Source, ...]:
    """All Python files in these directories and files of the repository, sorted."""
    paths: list[Path] = []
    for place in places:
        path = ROOT / place
        paths += sorted(path.rglob("*.py")) if path.is_dir() else [path] if path.exists() else []
    return tuple(_parse_once(path) for path in paths if "__pycache__" not in path.parts)


def parse(path: Path) -> Source:
    text = path.read_text(encoding="utf-8")
    return Source(path, text, ast.parse(text, filename=str(path)))


_parse_once = functools.cache(parse)


@functools.cache
def is_module(name: str) -> bool:
    """Whether the dotted name is a module or package of this repository."""
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path.is_dir() and any(path.glob("**/*.py")))


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function and method, nested ones too, by qualified name."""
    for child in ast.iter_child_nodes(node):
        name = prefix
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + child.name, child
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}{child.name}."
        yield from functions(child, name)


def dotted(node: ast.AST) -> str:
    """The dotted name an expression spells, such as torch.cuda.synchronize; "" when it is no plain name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def docstrings(tree: ast.AST) -> set[int]:
    """Ids of the string constants that are statements by themselves: documentation, not values."""
    return {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }


def _type_checking_blocks(nodes: list[ast.AST]) -> Iterator[ast.AST]:
    for node in nodes:
        if isinstance(node, ast.If) and dotted(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            yield from node.body

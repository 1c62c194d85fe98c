# SPDX-License-Identifier: Apache-2.0
"""X1: nothing that runs code found in data. Looks at the syntax tree, so that words in comments do not count.

Refused: unpickling (pickle.load, loads, Unpickler without an allow-list), torch.load unless weights_only=True, eval and
exec, yaml loaders other than the safe one, shells, object arrays (allow_pickle=True), code from model hubs.
"""

from __future__ import annotations

import ast

import pytest

from tests.support.source_code import dotted, sources

PLACES = ("megatron", "tools", "examples", "pretrain_gpt.py")

FORBIDDEN_NAMES = {
    "cPickle.load",
    "cPickle.loads",
    "dill.load",
    "dill.loads",
    "joblib.load",
    "marshal.load",
    "marshal.loads",
    "os.popen",
    "os.system",
    "pickle.load",
    "pickle.loads",
    "shelve.open",
    "yaml.full_load",
    "yaml.load",
    "yaml.unsafe_load",
}
FORBIDDEN_ARGUMENTS = {"shell": True, "allow_pickle": True, "trust_remote_code": True, "weights_only": False}


def dangers(tree: ast.Module) -> list[str]:
    """`line: what` of everything the gate refuses."""
    aliases = _aliases(tree)
    restricted = _restricted_unpicklers(tree, aliases)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = _resolved(node.func, aliases)
            if name in ("eval", "exec", "builtins.eval", "builtins.exec"):
                found.append(f"{node.lineno}: {name}()")
            if name == "torch.load" and not _has(node, "weights_only", True):
                found.append(f"{node.lineno}: torch.load without weights_only=True")
            found += [
                f"{node.lineno}: {key}={value}" for key, value in FORBIDDEN_ARGUMENTS.items() if _has(node, key, value)
            ]
        elif isinstance(node, ast.Attribute | ast.Name):
            name = _resolved(node, aliases)
            if name in FORBIDDEN_NAMES:
                found.append(f"{node.lineno}: {name}")
            if name == "pickle.Unpickler" and id(node) not in restricted:
                found.append(f"{node.lineno}: pickle.Unpickler without find_class")
    return found


def _aliases(tree: ast.Module) -> dict[str, str]:
    """Local name -> what was imported under it."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {a.asname: a.name for a in node.names if a.asname}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return names


def _resolved(node: ast.AST, aliases: dict[str, str]) -> str:
    first, dot, rest = dotted(node).partition(".")
    return aliases.get(first, first) + dot + rest


def _restricted_unpicklers(tree: ast.Module, aliases: dict[str, str]) -> set[int]:
    """Ids of the base-class expressions of Unpicklers that decide themselves which classes may be made."""
    return {
        id(base)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and any(getattr(item, "name", "") == "find_class" for item in node.body)
        for base in node.bases
        if _resolved(base, aliases) == "pickle.Unpickler"
    }


def _has(call: ast.Call, name: str, value: object) -> bool:
    return any(k.arg == name and isinstance(k.value, ast.Constant) and k.value.value is value for k in call.keywords)


def test_X1_the_tree_is_clean() -> None:
    found = [f"{source.relative}:{danger}" for source in sources(*PLACES) for danger in dangers(source.tree)]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle\npickle.load(f)",
        "import pickle as p\np.loads(b)",
        "from pickle import loads\nloads(b)",
        "import pickle\nload = pickle.load",
        "import pickle\npickle.Unpickler(f).load()",
        "import pickle\nclass U(pickle.Unpickler):\n    def persistent_load(self, x): ...",
        "import torch\ntorch.load(f)",
        "import torch\ntorch.load(f, weights_only=False)",
        "import torch\ntorch.load(f, weights_only=flag)",
        "eval(text)",
        "exec(text)",
        "import yaml\nyaml.load(f, Loader=yaml.Loader)",
        "import yaml\nyaml.unsafe_load(f)",
        "import subprocess\nsubprocess.run(text, shell=True)",
        "import os\nos.system(text)",
        "import numpy as np\nnp.load(f, allow_pickle=True)",
        "AutoTokenizer.from_pretrained(name, trust_remote_code=True)",
    ],
)
def test_X1_dangers_are_seen(text: str) -> None:
    assert dangers(ast.parse(text)) != []


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.load(f, weights_only=True)",
        "import yaml\nyaml.safe_load(f)",
        "import pickle\npickle.dumps(x)",
        "import pickle\nclass Safe(pickle.Unpickler):\n    def find_class(self, module, name): ...",
        "model.eval()",
        "import subprocess\nsubprocess.run(['ls'])",
        "import json\njson.load(f)",
        '"""Never pickle.load, eval(x) or shell=True."""',
    ],
)
def test_X1_harmless_things_pass(text: str) -> None:
    assert dangers(ast.parse(text)) == []

# SPDX-License-Identifier: Apache-2.0
"""Files and functions one can read in one sitting. An exemption needs a reason, and goes when nothing needs it."""

from __future__ import annotations

import ast

from tests.support.source_code import Source, functions, sources

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
MAX_PARAMETERS = 10
MAX_NESTING = 4

PLACES = ("megatron", "tools", "examples", "benchmarks", "pretrain_gpt.py", "setup.py", "tests")

LONG_FILES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}
MANY_PARAMETERS: dict[str, str] = {
    "megatron/core/tensor_parallel/layers.py:ColumnParallelLinear.__init__": "upstream's signature",
    "megatron/core/models/common/embeddings/rope_utils.py:_apply_rotary_pos_emb_thd": ("upstream's signature"),
    "megatron/core/models/common/embeddings/yarn_rotary_pos_embedding.py:YarnRotaryEmbedding.__init__": (
        "upstream's signature"
    ),
    "megatron/core/models/gpt/gpt_model.py:GPTModel.__init__": "upstream's signature",
    "megatron/core/models/gpt/gpt_layer_specs.py:get_gpt_layer_with_transformer_engine_spec": "upstream's signature",
    "megatron/core/models/gpt/gpt_model.py:GPTModel._postprocess": "upstream's signature",
    "megatron/core/models/gpt/gpt_model.py:GPTModel.forward": "upstream's signature",
    "megatron/core/parallel_state.py:initialize_model_parallel": "upstream's signature",
    "megatron/core/models/hybrid/hybrid_block.py:HybridStack.__init__": "upstream's signature",
    "megatron/core/models/hybrid/hybrid_model.py:HybridModel.__init__": "upstream's signature",
    "megatron/core/models/multimodal/llava_model.py:LLaVAModel.__init__": "upstream's signature",
    "megatron/core/optimizer_param_scheduler.py:OptimizerParamScheduler.__init__": "upstream's signature",
    "megatron/core/upstream/layers.py:topk_routing_with_score_function": "upstream's signature",
    "megatron/training/training.py:pretrain": "upstream's signature, and one keyword for each hook",
}
DEEP_NESTING: dict[str, str] = {}
"""File, or file:function with its class -> why it may be larger."""

_BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    # A GPU kernel is handed addresses and numbers one by one; the function that launches it is what others call.
    if any(ast.unparse(decorator) == "triton.jit" for decorator in function.decorator_list):
        return 0
    return sum(argument.arg not in ("self", "cls") for argument in named)


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, without the docstring."""
    last = function.end_lineno or function.lineno
    first = function.body[0]
    documented = (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    )
    return last - function.lineno + 1 - ((first.end_lineno or 0) - first.lineno + 1 if documented else 0)


def nesting(node: ast.AST) -> int:
    """How many blocks stand inside one another; an elif is on the level of its if."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        deepest = max(deepest, nesting(child) + (isinstance(child, _BLOCKS) and not is_elif))
    return deepest


def too_large(measured: dict[str, int], limit: int, exempt: dict[str, str]) -> list[str]:
    """What exceeds the limit without an exemption, and exemptions that nothing needs."""
    over = {name: size for name, size in measured.items() if size > limit}
    found = [f"{name}: {size} > {limit}" for name, size in over.items() if name not in exempt]
    return found + [f"{name}: exempt for nothing" for name in exempt if name not in over]


def by_function(files: tuple[Source, ...]) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    return {f"{source.relative}:{name}": function for source in files for name, function in functions(source.tree)}


def test_files() -> None:
    lines = {source.relative: source.text.count("\n") for source in sources(*PLACES)}
    assert too_large(lines, MAX_FILE_LINES, LONG_FILES) == []


def test_functions() -> None:
    lines = {name: code_lines(function) for name, function in by_function(sources(*PLACES)).items()}
    assert too_large(lines, MAX_FUNCTION_LINES, LONG_FUNCTIONS) == []


def test_parameters() -> None:
    counts = {name: parameters(function) for name, function in by_function(sources(*PLACES)).items()}
    assert too_large(counts, MAX_PARAMETERS, MANY_PARAMETERS) == []


def test_nesting() -> None:
    depths = {name: nesting(function) for name, function in by_function(sources(*PLACES)).items()}
    assert too_large(depths, MAX_NESTING, DEEP_NESTING) == []


def test_measures_by_example() -> None:
    text = (
        "def f(self, a, *, b=1, **c):\n"
        '    """Two\n    lines."""\n'
        "    for x in a:\n        if x:\n            pass\n        elif b:\n"
        "            while x:\n                pass\n"
    )
    ((name, function),) = functions(ast.parse(text))
    assert name == "f"
    assert (parameters(function), code_lines(function), nesting(function)) == (2, 7, 3)
    assert too_large({"a": 5, "b": 1}, 3, {"b": "why"}) == ["a: 5 > 3", "b: exempt for nothing"]

# SPDX-License-Identifier: Apache-2.0
"""`--config FILE.yaml`: the same flags, written as a YAML mapping.

    num-layers: 12            # or num_layers
    bf16: true
    data_path: [0.7, a_text_document, 0.3, b_text_document]

Every scalar is read as text and goes through the same parser as the command line, so `lr: 1e-4` is a number and `nan`
is not. Errors name file and line. Aliases, and files of more than 128 KiB, are refused: a list of flags needs neither.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import yaml

from megatron.core.setting import Setting
from megatron.training.flags.declarations import flags_by_spelling
from megatron.training.flags.flag import formers_by_name
from megatron.training.flags.given import ParsedFlags, divide_tokens, translate
from megatron.training.flags.parser import unknown_flag

# Far more than every flag with a long blend would take.
LARGEST_FILE_BYTES = 2**17
_DEEPEST = 3
# YAML 1.1's words, which people write; a value that means them as text is quoted.
_TRUE, _FALSE, _NULL = ("true", "yes", "on"), ("false", "no", "off"), ("", "null", "~", "none")


def read_yaml_config(path: str, parsed: ParsedFlags) -> None:
    """Record every flag of the file with source "file"."""
    try:
        text = _read(Path(path))
        # Events are read one by one, so nothing large has been built when an alias is met.
        _refuse_aliases_and_depth(text, path)
        # Nodes instead of values: they keep the line and the text, which `load` would turn into Python numbers.
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        parsed.misspelt(f"{path}:{mark.line + 1 if mark else 1}: not valid YAML: {error.problem or error.context}")
        return
    except (yaml.YAMLError, ValueError) as error:
        parsed.misspelt(f"{path}: {' '.join(str(error).split())}")
        return
    except OSError as error:
        parsed.misspelt(f"--config {path} cannot be read: {error.strerror or error}")
        return
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        parsed.misspelt(f"{path}:{root.start_mark.line + 1}: expected `flag: value` lines")
        return
    _record_mapping(root, path, parsed)


def _read(path: Path) -> str:
    if path.is_dir():
        raise ValueError("is a directory; give a YAML file")
    with path.open("rb") as file:
        # One byte more than allowed tells a file that is too large without reading all of it.
        content = file.read(LARGEST_FILE_BYTES + 1)
    if len(content) > LARGEST_FILE_BYTES:
        raise ValueError(f"is larger than {LARGEST_FILE_BYTES} bytes; a file of flags is not")
    try:
        # Windows editors put a byte-order mark in front.
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 text (byte {error.start}); save it as UTF-8") from None


def _refuse_aliases_and_depth(text: str, path: str) -> None:
    """Raise before anything is built: an alias can stand for any amount of content."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise _invalid("aliases are not read; write the value out", event)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise _invalid("nested too deeply", event)


def _invalid(problem: str, event: yaml.Event) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=cast(yaml.Mark, event.start_mark))


def _record_mapping(root: yaml.MappingNode, path: str, parsed: ParsedFlags) -> None:
    lines: dict[str, int] = {}
    for key_node, value_node in root.value:
        line = key_node.start_mark.line + 1
        place = f"{path}:{line}: "
        if not isinstance(key_node, yaml.ScalarNode):
            parsed.misspelt(f"{place}expected the name of a flag")
            continue
        spelling = "--" + key_node.value.lstrip("-").replace("_", "-")
        if spelling in lines:
            parsed.misspelt(f"{place}{key_node.value} is given twice, first in line {lines[spelling]}; keep one")
            continue
        lines[spelling] = line
        _record(spelling, value_node, place, parsed)


def _record(spelling: str, node: yaml.Node, place: str, parsed: ParsedFlags) -> None:
    texts = _texts(node)
    former, flag = formers_by_name().get(spelling), flags_by_spelling().get(spelling)
    if flag is None and former is None:
        known = [*flags_by_spelling(), *formers_by_name()]
        parsed.misspelt(place + unknown_flag(spelling, known))
    elif texts is None:
        parsed.misspelt(f"{place}{spelling} holds a mapping or a nested list; flags stand at the top level of the file")
    elif isinstance(node, yaml.ScalarNode) and node.style is None and node.value.lower() in _NULL:
        return
    elif former is not None:
        if former.nargs != 0 or texts[0].lower() in _TRUE:
            for name, values in divide_tokens(translate(former, texts if former.nargs != 0 else [], parsed, place)):
                parsed.give(flags_by_spelling()[name], name, values, "file", place)
    elif flag is not None and flag.is_switch:
        _record_switch(flag, spelling, texts, place, parsed)
    elif flag is not None:
        _record_values(flag, spelling, texts, place, parsed)


def _record_switch(flag: Setting, spelling: str, texts: list[str], place: str, parsed: ParsedFlags) -> None:
    text = texts[0].lower() if len(texts) == 1 else ""
    if text not in _TRUE + _FALSE:
        parsed.misspelt(f"{place}{spelling} is a switch; give true or false", flag)
        return
    # `no-mmap-bin-files: false` means that they are mapped.
    is_on = (text in _TRUE) == (spelling in flag.names)
    if is_on or flag.off_names:
        name = spelling if text in _TRUE else (flag.names if is_on else flag.off_names)[0]
        parsed.give(flag, name, [], "file", place)


def _record_values(flag: Setting, spelling: str, texts: list[str], place: str, parsed: ParsedFlags) -> None:
    wanted = 1 if flag.nargs is None else flag.nargs
    if isinstance(wanted, int) and len(texts) != wanted:
        parsed.misspelt(
            f"{place}{spelling} takes {wanted} value{'s' * (wanted != 1)}, but {len(texts)} are given", flag
        )
    else:
        parsed.give(flag, spelling, texts, "file", place)


def _texts(node: yaml.Node) -> list[str] | None:
    """The scalars of a value as they are written; None for anything nested."""
    nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
    return [item.value for item in nodes] if all(isinstance(item, yaml.ScalarNode) for item in nodes) else None

# SPDX-License-Identifier: Apache-2.0
"""`convert --list`: the types of models that convert, each of which round trips in test_bridge.py."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

from megatron.hf.convert import main
from megatron.training.recipes.families import FAMILIES, find_family
from megatron.training.recipes.missing_families import MISSING
from tests.support.family_models import MODELS, make_model


def test_the_list_names_every_type_and_class(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["convert", "--list"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    for family in FAMILIES:
        for model_type in (family.model_type, *family.aliases):
            assert any(line.split()[:1] == [model_type] and line.endswith(family.model_class) for line in lines)
    for model_type, lacks in MISSING.items():
        assert any(line.split()[:1] == [model_type] and line.endswith(lacks) for line in lines)
    types = sum(1 + len(family.aliases) for family in FAMILIES)
    assert lines[-2].startswith(f"{types} types convert, in both directions. Exact: every weight, bit for bit.")


def test_every_listed_type_is_built() -> None:
    """And so counted: test_round_trip converts each of these."""
    built = {find_family(make_model(name).config.model_type).model_type for name in MODELS}
    assert built == {family.model_type for family in FAMILIES}


def test_most_popular_types_convert() -> None:
    """Of those that a user may bring; what the others lack is listed. Kimi K2 is a DeepSeek V3."""
    convert = {family.model_type for family in FAMILIES}
    assert len(convert - MISSING.keys()) >= 72 and len(convert | MISSING.keys()) >= 92


def test_transformers_is_as_new_as_the_development_extra_asks() -> None:
    """A family that it lacks would fail; without transformers tests of families would be skipped."""
    setup = (Path(__file__).parents[3] / "setup.py").read_text()
    (wanted,) = re.findall(r'"transformers>=([\d.]+)"', setup)
    found = importlib.metadata.version("transformers")
    assert [int(x) for x in found.split(".")[:2]] >= [int(x) for x in wanted.split(".")[:2]] >= [5, 23], found

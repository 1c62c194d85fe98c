# SPDX-License-Identifier: Apache-2.0
"""Small command lines, each about one rule between flags: upstream's verdict and derived values, and ours."""

from __future__ import annotations

import functools
import shlex
from collections import Counter
from pathlib import Path

import pytest

from tests.golden.flag_cases import NOT_COMPARED, Outcome, our_value, rows, run, same

CHECKS = {row["id"]: row for row in rows(Path(__file__).parent / "data" / "flags" / "checks.tsv")}
# Refused upstream; here nothing stands against them (but a status, where that is said), and why.
BETTER_HERE = {
    "C023": "without --eval-interval there is no evaluation; upstream crashes",
    "C033": "CUDA_DEVICE_MAX_CONNECTIONS is set where a layout needs it",
    "C120": "--use-torch-fsdp2 works with tied embeddings",
    "C131": "the fused loss is deterministic: its kernel adds nothing atomically",
    "C137": "--DDP-impl of earlier releases has no effect and is noted",
    "C138": "--no-async-tensor-model-parallel-allreduce of earlier releases has no effect and is noted",
}
# Refused upstream by a rule, here because the flag is not supported or planned.
STATUS_REFUSES = {
    "C072": "--checkpoint-activations: not supported, the sentence names its successors",
    "C134": "--model-parallel-size: not supported, the sentence names its successor",
    "C135": "--warmup: not supported, the sentence names its successor",
}
# Values we derive otherwise, and why.
OTHER_VALUES = {
    ("C029", "group_query_attention"): "--num-query-groups implies --group-query-attention",
    ("C104", "no_load_optim"): "a dense checkpoint gives weights alone; an upcycled run is resumed whole",
    ("C104", "no_load_rng"): "likewise",
    ("C122", "use_distributed_optimizer"): "PyTorch's FSDP2 divides the optimizer state itself",
}


def environment(row: dict[str, str]) -> dict[str, str]:
    """WORLD_SIZE and the variables of the case."""
    pairs = dict(text.split("=", 1) for text in row["env"].split() if "=" in text)
    return {name: value for name, value in pairs.items() if value != "(unset)"} | {"WORLD_SIZE": row["world_size"]}


@functools.cache
def outcome_of(name: str) -> Outcome:
    return run(shlex.split(CHECKS[name]["argv"]), environment(CHECKS[name]))


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_check(name: str) -> None:
    """Refused where upstream refuses, unless we do better; accepted where it accepts, unless by a flag's status."""
    row, outcome = CHECKS[name], outcome_of(name)
    rules = outcome.of_kind("rule", "spelling")
    if row["upstream_outcome"] == "accepts" or name in BETTER_HERE:
        assert not rules
        assert outcome.is_accepted or outcome.of_kind("planned", "not supported")
    else:
        assert not outcome.is_accepted, row["rule"]
        assert bool(rules) != (name in STATUS_REFUSES), row["rule"]
    assert_same_values(name, row, outcome)


def assert_same_values(name: str, row: dict[str, str], outcome: Outcome) -> None:
    for pair in filter(None, row["post_validate_values"].split("; ")):
        value, upstream = pair.split("=", 1)
        if value not in NOT_COMPARED:
            ours = our_value(outcome.examination, value)
            assert same(ours, upstream) != ((name, value) in OTHER_VALUES), f"{value}: ours {ours}, upstream {upstream}"


def test_tally(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints how the checks end."""
    tally = Counter(
        f"upstream {row['upstream_outcome']}, here {'accepted' if outcome_of(name).is_accepted else 'refused'}"
        for name, row in CHECKS.items()
    )
    with capsys.disabled():
        print("\nflag checks:", *(f"  {count:3d} {what}" for what, count in sorted(tally.items())), sep="\n")
    assert tally["upstream accepts, here accepted"] >= 29

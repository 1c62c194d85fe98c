# SPDX-License-Identifier: Apache-2.0
"""Command lines of real launch scripts, documents and tests, as upstream and we see them at the same world size."""

from __future__ import annotations

import functools
import re
import shlex
from collections import Counter
from pathlib import Path

import pytest

from tests.golden.flag_cases import NOT_COMPARED, Outcome, our_value, rows, run, same

CASES = Path(__file__).parent / "data" / "flags" / "launch_cases"
STATUS = {row["case"]: row for row in rows(CASES / "_upstream_status.tsv")}
SUPPLIED = {
    "micro_batch_size": ["--micro-batch-size", "1"],
    "eval_interval": ["--eval-interval", "1000"],
    "train_iters": ["--train-iters", "100"],
    "lr": ["--lr", "3e-4"],
}
# Refused by upstream, accepted here but for flags that are planned or not supported, and why.
BETTER_HERE = {
    "arch_gpt-oss-20b": "upstream's parser knows its Model Optimizer flags only when that is installed",
    "arch_llama-4-scout-17b-16e-instruct": "likewise",
    "ft_gpt__gpt3_mcore_tp1_pp1_fsdp2_resume_torch_dist_te": "--use-torch-fsdp2 works with tied embeddings",
    "ft_gpt__gpt3_weekly_mcore_tp2_pp2_current_scaling_native_fp8_tp_pp_sp_tp_overlap": "both flags work together",
    "sc21_figure_17": "--DDP-impl and --activations-checkpoint-method of earlier releases are understood",
    "sc21_table_1_145B": "likewise",
    "sc21_table_1_1T": "likewise",
    "sc21_table_1_1p7B": "likewise",
    "seed_002_fp8_hybrid": "--fp8-hybrid is understood",
    "seed_002_oom_offload": "--cpu-optimizer is understood",
    "seed_llama_70b": "without --eval-interval there is no evaluation; upstream crashes",
}
# Values we derive otherwise, and why.
OTHER_VALUES = {
    ("ft_moe__deepseek_proxy_fsdp_ep2_fsdp2", "use_distributed_optimizer"): "FSDP2 divides the optimizer state itself",
    ("llama3_8b_h100_fp8_data", "split"): "literal quotes are taken off",
    ("llama3_8b_h100_fp8_mock", "split"): "literal quotes are taken off",
    ("ft_gpt__gpt3_15b_8t_release_gb200", "global_batch_size"): "with a step schedule, the batch the run ends with",
    ("ft_gpt__gpt3_15b_8t_release_sm", "global_batch_size"): "with a step schedule, the batch the run ends with",
}


def command_line(case: str) -> list[str]:
    """The case's flags, placeholders filled in."""
    lines = (CASES / f"{case}.txt").read_text().splitlines()
    text = " ".join(line for line in lines if line and not line.startswith("#"))
    argv = shlex.split(re.sub(r"@([A-Z0-9_]+)@", lambda match: f"/{match[1].lower()}", text))
    assert len(argv) == int(STATUS[case]["n_argv"])
    for value in filter(None, STATUS[case]["values_supplied_for_fragment"].split(",")):
        argv += SUPPLIED[value]
    return argv


def environment(case: str) -> dict[str, str]:
    lines = re.findall(r"^# env: (\w+)=(.*)$", (CASES / f"{case}.txt").read_text(), re.MULTILINE)
    return dict(lines) | {"WORLD_SIZE": STATUS[case]["world_used"]}


def upstream_accepts(case: str) -> bool:
    stages = ("upstream_parse", "validate_args", "transformer_config", "lr_scheduler", "eval_sample_count")
    return all(STATUS[case][stage] == "ok" for stage in stages)


@functools.cache
def outcome_of(case: str) -> Outcome:
    return run(command_line(case), environment(case))


@pytest.mark.parametrize("case", sorted(STATUS))
def test_launch_case(case: str) -> None:
    """Accepted where upstream accepts, unless a flag is planned or not supported; no rule that upstream lacks."""
    outcome = outcome_of(case)
    status_only = not outcome.of_kind("rule", "spelling")
    if upstream_accepts(case):
        assert status_only, outcome.of_kind("rule", "spelling")
        assert outcome.is_accepted or outcome.of_kind("planned", "not supported")
    elif case in BETTER_HERE:
        assert status_only, outcome.of_kind("rule", "spelling")
    else:
        assert not outcome.is_accepted, f"upstream: {STATUS[case]}"
        assert not status_only, "upstream refuses it for another reason than a status of ours"
    assert_same_values(case, outcome)


def assert_same_values(case: str, outcome: Outcome) -> None:
    if outcome.examination.config is None:
        return
    for column, upstream in STATUS[case].items():
        name = column.removeprefix("post.")
        if column.startswith("post.") and upstream and name not in NOT_COMPARED:
            ours = our_value(outcome.examination, name)
            is_same = same(ours, upstream)
            assert is_same != ((case, name) in OTHER_VALUES), f"{name}: ours {ours}, upstream {upstream}"


def _tally(case: str, outcome: Outcome) -> str:
    theirs = "accepted upstream" if upstream_accepts(case) else "refused upstream"
    if outcome.is_accepted:
        return f"{theirs}, accepted here"
    if outcome.of_kind("rule", "spelling"):
        return f"{theirs}, refused here by a rule"
    return f"{theirs}, refused here only for flags that are planned or not supported"


def test_tally(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints how the cases end."""
    tally = Counter(_tally(case, outcome_of(case)) for case in STATUS)
    with capsys.disabled():
        print("\nlaunch cases:", *(f"  {count:3d} {what}" for what, count in sorted(tally.items())), sep="\n")
    assert len(STATUS) == 70
    assert tally["accepted upstream, accepted here"] >= 8

# SPDX-License-Identifier: Apache-2.0
"""--sft from end to end: JSONL, the tokenizer's files, a chat template in a file, and what the log says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.functional.pretrain_runs import TINY, metrics, run
from tests.preprocess_runs import HF_FLAGS

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.mark.flags("--sft", "--chat-template")
def test_conversations_train(tmp_path: Path) -> None:
    conversation = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "It is a list."}]
    (tmp_path / "chat.jsonl").write_text((json.dumps({"messages": conversation}) + "\n") * 40)
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    base = " ".join(TINY).replace("--mock-data --tokenizer-type NullTokenizer --vocab-size 60", "").split()
    flags = ["--sft", "--data-path", tmp_path / "chat.jsonl", "--split", "1,0,0", "--metrics-dir", tmp_path / "metrics"]
    done = run([*base, *HF_FLAGS, "--chat-template", tmp_path / "template.jinja", *flags])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("train data: 40 conversations packed into") == 1 and "% padding" in done.stdout
    losses = [row["lm loss"] for row in metrics(tmp_path / "metrics")]
    assert len(losses) == 5 and losses[-1] < losses[0] < 8

    done = run([*base, *HF_FLAGS, *flags])
    assert done.returncode == 2 and "has no chat template; give one with --chat-template" in done.stderr

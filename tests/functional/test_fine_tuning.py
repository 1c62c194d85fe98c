# SPDX-License-Identifier: Apache-2.0
"""docs/fine_tuning.md: its four commands, with a small model, turn a file of conversations into answers."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.functional.pretrain_runs import ROOT, environment, finish
from tests.preprocess_runs import DATA
from tests.programs import Program

TOKENIZER = DATA / "tok" / "hf_bpe1k"
QUESTION, ANSWER, OTHER_ANSWER = "Who are you?", "The help desk.", "The library."
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SMALL = {
    "--nproc_per_node 8": "--nproc_per_node 2", "--seq-length 4096": "--seq-length 128", "--train-iters 500":
    "--train-iters 20", "--lr-warmup-iters 20": "--lr-warmup-iters 2",
    "--global-batch-size 64": "--global-batch-size 8",
}  # fmt: skip
"""What the page says -> what a test has time for."""


def make_model(directory: Path) -> None:
    """A tiny random Qwen 2 with a tokenizer that has a chat template."""
    transformers = pytest.importorskip("transformers")
    vocabulary = json.loads((TOKENIZER / "tokenizer.json").read_text())["model"]["vocab"]
    config = transformers.Qwen2Config(
        vocab_size=len(vocabulary), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, eos_token_id=0,
    )  # fmt: skip
    # So few steps teach an answer from most beginnings, not from all.
    torch.manual_seed(0)
    transformers.Qwen2ForCausalLM(config).save_pretrained(directory)
    shutil.copy(TOKENIZER / "tokenizer.json", directory)
    settings = json.loads((TOKENIZER / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))


def run_command(command: str, directory: Path) -> str:
    """Run `python -m megatron ...` there, with the question for a program that asks, and return what it printed."""
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "megatron"]
    if words[3] == "generate":
        program = [sys.executable, str(ROOT / "tools" / "generate.py"), *words[4:]]
        done = subprocess.run(
            program, cwd=directory, env=environment({}), input=QUESTION, capture_output=True, text=True, timeout=240
        )
    else:
        arguments = [ROOT / "megatron" / "__main__.py", *words[3:]]
        done = finish([Program(arguments, environment({"PYTHONPATH": str(ROOT)}), directory)])[0]
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


def read_commands(heading: str, rate: str, small_rate: str = "1e-2", count: int = 4) -> list[str]:
    """The commands of a section of the page, with sizes that a test has time for. rate: what the section says."""
    text = (ROOT / "docs" / "fine_tuning.md").read_text(encoding="utf-8")
    section = text.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    commands = [block.replace("\\\n", " ").strip() for block in re.findall(r"```bash\n(.*?)```", section, re.DOTALL)]
    assert len(commands) == count
    for index in [index for index, command in enumerate(commands) if " launch " in command]:
        for said, small in (SMALL | {f"--lr {rate}": f"--lr {small_rate}"}).items():
            assert said in commands[index] or said.startswith("--lr-warmup") and "--logits-save-dir" in commands[index]
            commands[index] = commands[index].replace(said, small)
    return commands


def test_the_four_commands_teach_an_answer(tmp_path: Path) -> None:
    commands = read_commands("The four commands", "1e-5")
    make_model(tmp_path / "Qwen2.5-0.5B-Instruct")
    conversation = {"messages": [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]}
    (tmp_path / "conversations.jsonl").write_text((json.dumps(conversation) + "\n") * 100)
    printed = [run_command(command, tmp_path) for command in commands]
    assert "verified: every weight bit for bit; logits" in printed[0] and "verified: every weight" in printed[3]
    assert ANSWER in printed[2]

    # The last block of the page, and a question to what it opens.
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (cls.from_pretrained(tmp_path / "tuned-hf") for cls in (AutoModelForCausalLM, AutoTokenizer))
    asked = tokenizer.apply_chat_template(conversation["messages"][:1], tokenize=False, add_generation_prompt=True)
    ids = tokenizer(asked, return_tensors="pt").input_ids
    answered = model.generate(input_ids=ids, do_sample=False, max_new_tokens=12, pad_token_id=0)[0, ids.shape[1] :]
    assert tokenizer.decode(answered).startswith(ANSWER)

    # The same with adapters, which are also read by peft.
    printed = [
        run_command(command, tmp_path) for command in read_commands("Adapters instead of weights (LoRA)", "2e-4")
    ]
    assert ANSWER in printed[1] and "verified: every weight bit for bit; logits" in printed[2]
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "Qwen2.5-0.5B-Instruct")
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")
    answered = adapted.generate(input_ids=ids, do_sample=False, max_new_tokens=12, pad_token_id=0)[0, ids.shape[1] :]
    assert tokenizer.decode(answered).startswith(ANSWER)

    # And with pairs of answers, of which the other one is preferred.
    pair = {"messages": conversation["messages"][:1], "chosen": OTHER_ANSWER, "rejected": ANSWER}
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair | {"id": i}) + "\n" for i in range(100)))
    printed = [run_command(command, tmp_path) for command in read_commands("Preferences (DPO)", "5e-7", "1e-3")]
    assert ANSWER in printed[0] and ANSWER not in printed[2] and "verified: every weight bit for bit" in printed[3]
    assert "reference log-probabilities: 1 pair by the weights of the beginning" in printed[1]

    # And without a layer and some channels, learnt again from what the whole model finds likely. Twenty steps leave a
    # teacher unsure, and a student takes longer to tell its first choice from its second.
    (pruning,) = read_commands("A smaller model of a trained one (pruning)", "", count=1)
    assert "--num-layers 18 --ffn-hidden-size 3840" in pruning
    run_command(
        pruning.replace("--num-layers 18 --ffn-hidden-size 3840", "--num-layers 1 --ffn-hidden-size 96"), tmp_path
    )
    heading = "A small model learns from a large one (distillation)"
    commands = [line.replace("--train-iters 20", "--train-iters 80") for line in read_commands(heading, "1e-4")]
    printed = [run_command(command, tmp_path) for command in commands]
    assert "teacher: 64 tokens at each place of 640 samples in logits" in printed[0] and "kd loss" in printed[1]
    assert ANSWER in printed[2] and "verified: every weight bit for bit" in printed[3]

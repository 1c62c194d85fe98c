# SPDX-License-Identifier: Apache-2.0
"""Models of images and text from end to end: the example on drawn shapes, and pretrain_vlm.py on what it leaves."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron.training.flags.read import read_run_config
from megatron.training.recipes.images import add_image_flags, build_image_model
from tests.functional.pretrain_runs import environment, finish, free_port, run
from tests.programs import Program

pytest.importorskip("PIL")

ROOT = Path(__file__).parents[2]


def documented(beginning: str) -> list[str]:
    """The words of a command of docs/images.md, after `python`."""
    text = (ROOT / "docs" / "images.md").read_text(encoding="utf-8")
    (command,) = re.findall(rf"^python {beginning}(?:.*\\\n)*.*", text, re.MULTILINE)
    return shlex.split(command.replace("\\\n", " "))[1:]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("images")
    program, *words = documented("examples/images/learn_shapes.py")
    done = run([*words, "--steps", "2", "--drawings", "24"], program=str(ROOT / program), directory=place)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\d of 12 answers are right; shapes/answers.png", done.stdout)
    assert (place / "shapes" / "answers.png").stat().st_size > 3000
    return place


def train(directory: Path, *flags: str, processes: int = 1, code: int = 0) -> str:
    program, *words = documented("pretrain_vlm.py")
    job = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    ranks = finish([
        Program([str(ROOT / program), *words, *flags], environment(job | {"RANK": rank, "LOCAL_RANK": rank}), directory)
        for rank in map(str, range(processes))
    ])  # fmt: skip
    errors = "".join(rank.stderr for rank in ranks)
    assert [rank.returncode for rank in ranks] == [code] * processes, errors
    assert "Traceback" not in errors
    return ranks[0].stdout + errors


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"lm loss: (\S+)", output)]


@pytest.fixture(scope="module")
def alone(directory: Path) -> list[float]:
    found = losses(train(directory))
    assert len(found) == 4 and found[-1] < found[0] < 8
    return found


def test_layouts_train_as_one_process_does(directory: Path, alone: list[float]) -> None:
    for layout in ("--tensor-model-parallel-size 2 --sequence-parallel", "--pipeline-model-parallel-size 2", ""):
        assert losses(train(directory, *layout.split(), processes=2)) == pytest.approx(alone, rel=1e-6), layout


def test_frozen_parts_are_not_trained(directory: Path, alone: list[float]) -> None:
    words = documented("pretrain_vlm.py")[1:]
    for flags, trained in (
        (["--freeze-LM"], {"vision_model", "vision_projection"}),
        (["--freeze-ViT"], {"vision_projection", "language_model"}),
    ):
        model = build_image_model(read_run_config([*words, *flags], {}, add_image_flags), 320)
        found = {name.partition(".")[0] for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert found == trained
    # A stage on which nothing is trained.
    frozen = losses(train(directory, "--freeze-LM", "--pipeline-model-parallel-size", "2", processes=2))
    assert frozen[0] == pytest.approx(alone[0], rel=1e-6) and frozen[-1] > alone[-1] + 0.1


def test_bad_images_are_named_or_skipped_and_counted(directory: Path) -> None:
    from PIL import Image

    shapes = directory / "bad"
    shutil.copytree(directory / "shapes", shapes)
    Image.new("RGB", (30_000, 2)).save(shapes / "0.png")
    (shapes / "1.png").write_bytes((shapes / "1.png").read_bytes()[:60])
    lines = (shapes / "train.jsonl").read_text().splitlines()
    flags = ["--data-path", "bad/train.jsonl", "--train-iters", "1"]

    def refuse(line: int, match: str, *more: str) -> None:
        (shapes / "train.jsonl").write_text((lines[line] + "\n") * 20)
        assert re.search(match, train(directory, *flags, *more, code=2))

    refuse(0, r"error: bad/train.jsonl, line \d+: bad/0.png is 30000 x 2 pixels, and images may have 20000 a side")
    refuse(1, r"error: bad/train.jsonl, line \d+: bad/1.png cannot be decoded as an image: ")
    (shapes / "train.jsonl").write_text("\n".join(lines))
    output = train(directory, *flags, "--skip-bad-images")
    assert "train data: 22 conversations about images, 2 skipped with bad images" in output
    (shapes / "train.jsonl").write_text("\n".join([*lines, '{"images": ["2.png"]}']))
    found = train(directory, *flags, "--skip-bad-images", code=2)
    assert 'error: bad/train.jsonl, line 25: expected "messages" with role and content' in found


def write(directory: Path, **line: Any) -> None:
    (directory / "shapes" / "other.jsonl").write_text((json.dumps(line) + "\n") * 20)


def test_other_lines(directory: Path) -> None:
    flags = ["--data-path", "shapes/other.jsonl", "--train-iters", "1"]
    turns = [{"from": "human", "value": "<image>What is this?"}, {"from": "gpt", "value": "a shape"}]
    write(directory, image="0.png", conversations=turns)
    assert losses(train(directory, *flags))
    write(directory, image=["0.png", "1.png"], conversations=turns)
    assert "the text has <image> 1 times, and 2 images; write as many" in train(directory, *flags, code=2)
    assert "--seq-length 48 has no room for text" in train(directory, *flags, "--images-per-sample", "3", code=2)
    assert "images come with conversations of a JSONL file" in train(directory, *flags, "--sft", code=2)
    assert "--dry-run tries models of text" in train(directory, *flags, "--dry-run", code=2)

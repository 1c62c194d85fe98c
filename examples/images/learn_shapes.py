# SPDX-License-Identifier: Apache-2.0
"""Train a small model on drawn shapes with captions, on a CPU in a few minutes, and look at what it answers.

    python examples/images/learn_shapes.py --output shapes

Leaves the drawings, train.jsonl, a tokenizer and a chat template, with which pretrain_vlm.py trains as well, and
answers.png: drawings that the model has not seen, and what it says about them.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.core.models.multimodal.llava_model import DEFAULT_IMAGE_TOKEN_INDEX  # noqa: E402
from megatron.training.flags.read import read_run_config  # noqa: E402
from megatron.training.recipes.images import add_image_flags, build_image_recipe  # noqa: E402
from megatron.training.training import run_recipe  # noqa: E402

COLOURS = ("red", "green", "blue", "orange")
SHAPES = ("square", "circle", "triangle")
QUESTION = "<image>What is this?"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
FLAGS = """
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 48 --max-position-embeddings 48
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --hidden-dropout 0
    --attention-dropout 0 --micro-batch-size 16 --global-batch-size 16 --lr 3e-3 --min-lr 1e-4 --split 1,0,0
    --init-method-std 0.1 --eval-iters 0 --log-interval 20 --vision-num-layers 2 --vision-hidden-size 64
    --vision-ffn-hidden-size 128 --vision-num-attention-heads 4 --img-h 32 --img-w 32 --patch-dim 8
    --disable-vision-class-token
    --tokenizer-type HuggingFaceTokenizer --make-vocab-size-divisible-by 16
"""


def describe(colour: str, shape: str) -> str:
    """The caption of a drawing."""
    return f"{'an' if colour == 'orange' else 'a'} {colour} {shape}"


def draw(colour: str, shape: str, chance: random.Random) -> Image.Image:
    """A shape somewhere on white, 32 pixels wide."""
    image = Image.new("RGB", (32, 32), "white")
    side = chance.randint(12, 20)
    x, y = chance.randint(1, 31 - side), chance.randint(1, 31 - side)
    pen = ImageDraw.Draw(image)
    if shape == "triangle":
        pen.polygon([(x, y + side), (x + side, y + side), (x + side // 2, y)], fill=colour)
    else:
        (pen.rectangle if shape == "square" else pen.ellipse)((x, y, x + side, y + side), fill=colour)
    return image


def write_data(output: Path, drawings: int) -> None:
    """Drawings and conversations about them, a tokenizer, and the template of a conversation."""
    chance, texts = random.Random(1), []
    (output / "tokenizer").mkdir(parents=True, exist_ok=True)
    with (output / "train.jsonl").open("w", encoding="utf-8") as file:
        for number in range(drawings):
            colour, shape = chance.choice(COLOURS), chance.choice(SHAPES)
            draw(colour, shape, chance).save(output / f"{number}.png")
            texts.append(describe(colour, shape))
            messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": texts[-1]}]
            file.write(json.dumps({"images": [f"{number}.png"], "messages": messages}) + "\n")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [*texts, "user: What is this?\nassistant: "] * 4,
        trainers.BpeTrainer(
            vocab_size=320, special_tokens=["<end>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )  # fmt: skip
    tokenizer.save(str(output / "tokenizer" / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (output / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (output / "chat.jinja").write_text(TEMPLATE, encoding="utf-8")


@torch.no_grad()
def answer(model: Any, tokenizer: Any, image: Image.Image, normalise: Any) -> str:
    """The model's likeliest answer to the question."""
    prompt = str(tokenizer.render_chat([{"role": "user", "content": QUESTION}], add_generation_prompt=True))
    before, after = (tokenizer.tokenize_as_is(part) for part in prompt.split("<image>"))
    ids = [*before, DEFAULT_IMAGE_TOKEN_INDEX, *after]
    images, said = normalise(image)[None], []
    while len(said) < 8 and (not said or said[-1] != tokenizer.eod):
        tokens = torch.tensor([[*ids, *said]])
        logits, _ = model(images, tokens, torch.arange(tokens.shape[1])[None])
        said.append(int(logits[0, -1].argmax()))
    return str(tokenizer.detokenize([token for token in said if token != tokenizer.eod])).strip()


def show(answers: list[tuple[Image.Image, str, str]], path: Path) -> None:
    """Write a picture of all drawings, each with its answer below it, which is red where it is wrong."""
    sheet = Image.new("RGB", (4 * 130, -(-len(answers) // 4) * 110), "white")
    pen = ImageDraw.Draw(sheet)
    for number, (image, said, wanted) in enumerate(answers):
        x, y = number % 4 * 130 + 10, number // 4 * 110 + 10
        sheet.paste(image.resize((64, 64)), (x, y))
        pen.rectangle((x, y, x + 64, y + 64), outline="grey")
        pen.text((x, y + 70), said, fill="black" if said == wanted else "red")
    sheet.save(path)


def main() -> int:
    """Draw, train, ask."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("shapes"), help="directory for all of it")
    parser.add_argument("--steps", type=int, default=1200, help="steps of training")
    parser.add_argument("--drawings", type=int, default=3000, help="drawings to train on")
    given = parser.parse_args()
    write_data(given.output, given.drawings)
    flags = [
        *FLAGS.split(), "--train-iters", str(given.steps), "--data-path", str(given.output / "train.jsonl"),
        "--tokenizer-model", str(given.output / "tokenizer"), "--chat-template", str(given.output / "chat.jinja"),
    ]  # fmt: skip
    config = read_run_config(flags, {}, add_image_flags)
    recipe = build_image_recipe(config)
    run = run_recipe(config, recipe)
    model = run.model[0].eval()
    dataset = run.data.datasets["train"]
    reader = getattr(dataset, "datasets", [dataset])[0]

    def normalise(image: Image.Image) -> torch.Tensor:
        import numpy as np

        found: torch.Tensor = reader.normalise(np.asarray(image))
        return found

    chance, answers = random.Random(2), []
    for colour in COLOURS:
        for shape in SHAPES:
            image = draw(colour, shape, chance)
            answers.append((image, answer(model, recipe.tokenizer, image, normalise), describe(colour, shape)))
    show(answers, given.output / "answers.png")
    right = sum(said == wanted for _, said, wanted in answers)
    print(f"{right} of {len(answers)} answers are right; {given.output / 'answers.png'} shows them")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

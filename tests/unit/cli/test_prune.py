# SPDX-License-Identifier: Apache-2.0
"""`megatron prune`: the parts that matter least by definition go, the rest computes what the whole model does without
them, and trains."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.cli.prune import main
from megatron.training.checkpoint.trained_model import load_trained_model
from tests.support import tiny_training
from tests.support.tiny_training import train_tiny

TEXTS = ["3 4 5 6 7 8", "9 1 2 9 1 2", "11 12 13"]
IDS = torch.tensor([[int(word) for word in TEXTS[0].split()]])
SIZES = "--num-layers 4 --hidden-size 24 --num-attention-heads 8 --seed 7"
MODELS = {
    "llama": "--group-query-attention --num-query-groups 4 --kv-channels 8 --normalization RMSNorm --swiglu "
    "--disable-bias-linear --qk-layernorm --position-embedding-type rope --no-rope-freq [0,0,1,0]",
    "gpt": "--kv-channels 4",
}


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("prune")
    (root / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    for name, flags in MODELS.items():
        train_tiny(*f"{SIZES} {flags} --ffn-hidden-size 20 --init-method-std 0.3 --save".split(), root / name)
    return {name: root / name for name in MODELS}


def prune(source: Path, output: Path, flags: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        data = source.parent / "texts.jsonl"
        words = f"prune --load {source} --save {output} --data {data} {flags}".split()
        patch.setattr(sys, "argv", words)
        return main()


def forward(model: Any, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(ids, torch.arange(ids.shape[1])[None], None)
        return logits[..., :50]


def note_inputs(model: Any) -> dict[tuple[int, str], Tensor]:
    """Of each layer what its parts read or give, for all tokens of all texts, [tokens, ...]."""
    noted: dict[tuple[int, str], list[Tensor]] = {}
    hooks = []
    for number, layer in enumerate(model.decoder.layers):
        parts = {
            "heads": layer.self_attention.linear_proj, "ffn": layer.mlp.linear_fc2, "in": layer,
            "hidden": layer.input_layernorm, "mlp": layer.pre_mlp_layernorm,
        }  # fmt: skip
        for name, module in parts.items():
            places = noted.setdefault((number, name), [])
            if name in ("hidden", "mlp"):
                hooks.append(module.register_forward_hook(lambda _, __, out, p=places: p.append(out[:, 0])))
            else:
                hooks.append(module.register_forward_pre_hook(lambda _, given, p=places: p.append(given[0][:, 0] + 0)))
    last = noted.setdefault((len(model.decoder.layers), "in"), [])
    final = noted.setdefault((len(model.decoder.layers), "hidden"), [])
    hooks.append(
        model.decoder.final_layernorm.register_forward_pre_hook(lambda _, given: last.append(given[0][:, 0] + 0))
    )
    hooks.append(model.decoder.final_layernorm.register_forward_hook(lambda _, __, out: final.append(out[:, 0])))
    for text in TEXTS:
        forward(model, torch.tensor([[int(word) for word in text.split()]]))
    for hook in hooks:
        hook.remove()
    return {key: torch.cat(parts) for key, parts in noted.items()}


def zero_least(model: Any, layers: int, hidden: int, ffn: int, groups: int, per_group: int) -> list[int]:
    """Set to zero what matters least, from the definition of each importance. Returns the layers that stay."""
    found, config = note_inputs(model), model.config
    all_layers = list(model.decoder.layers)
    lengths = torch.cat([part.abs() for (_, name), part in found.items() if name in ("hidden", "mlp")]).sum(0)
    gone_hidden = lengths.argsort()[: len(lengths) - hidden]
    changes = []
    for number, layer in enumerate(all_layers):
        before, after = found[number, "in"], found[number + 1, "in"]
        changes.append(float((1 - (before * after).sum(1) / before.norm(dim=1) / after.norm(dim=1)).mean()))
        proj, fc2 = layer.self_attention.linear_proj.weight, layer.mlp.linear_fc2.weight
        channels = torch.stack(
            [(found[number, "ffn"][:, j : j + 1] * fc2[:, j]).norm(dim=1).mean() for j in range(fc2.shape[1])]
        )
        fc2.data[:, channels.argsort()[: len(channels) - ffn]] = 0
        width = config.kv_channels
        heads = torch.stack([
            (found[number, "heads"][:, first : first + width] @ proj[:, first : first + width].T).norm(dim=1).mean()
            for first in range(0, proj.shape[1], width)
        ]).view(config.num_query_groups, -1)  # fmt: skip
        best_groups = heads.sum(1).argsort(descending=True)[:groups]
        for group in range(config.num_query_groups):
            best = heads[group].argsort(descending=True)[: per_group if group in best_groups else 0].tolist()
            for head in set(range(heads.shape[1])) - set(best):
                first = (group * heads.shape[1] + head) * width
                proj.data[:, first : first + width] = 0
    stay = sorted(sorted(range(len(changes)), key=lambda number: changes[number])[len(changes) - layers :])
    for number, layer in enumerate(all_layers):
        for linear in (layer.self_attention.linear_proj, layer.mlp.linear_fc2):
            for value in (linear.weight, linear.bias):
                if value is not None:
                    value.data[gone_hidden if number in stay else slice(None)] = 0
    model.embedding.word_embeddings.weight.data[:, gone_hidden] = 0
    return stay


@pytest.mark.parametrize(
    ("name", "flags", "sizes"),
    [
        ("llama", "--num-layers 3 --hidden-size 16 --ffn-hidden-size 12 --num-attention-heads 3 --num-query-groups 3",
         (3, 16, 12, 3, 1)),
        ("gpt", "--num-layers 2 --ffn-hidden-size 17 --num-attention-heads 5", (2, 24, 17, 5, 1)),
    ],
)  # fmt: skip
def test_a_pruned_model_is_the_zeroed_one(
    name: str,
    flags: str,
    sizes: tuple[int, ...],
    roots: dict[str, Path],
    tmp_path: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert prune(roots[name], tmp_path / "pruned", flags) == 0
    whole, pruned = load_trained_model(roots[name]).model, load_trained_model(tmp_path / "pruned").model
    stay = zero_least(whole, *sizes)
    assert f"layers {' '.join(map(str, stay))} of 4 stay" in capsys.readouterr().out
    assert forward(whole).std() > 0.1
    torch.testing.assert_close(forward(pruned), forward(whole), rtol=1e-4, atol=1e-4)
    numbers = {key: value.shape for key, value in pruned.named_parameters()}
    assert numbers["decoder.layers.0.mlp.linear_fc2.weight"] == (sizes[1], sizes[2])
    assert len(pruned.decoder.layers) == sizes[0]  # type: ignore[union-attr, arg-type]
    without_sizes = tiny_training.FLAGS.replace("--num-layers 2 --hidden-size 16 --num-attention-heads 2", "")
    monkeypatch.setattr(tiny_training, "FLAGS", without_sizes)
    run = train_tiny("--pretrained-checkpoint", tmp_path / "pruned", "--use-checkpoint-args", "--train-iters", "1")
    assert run.progress.iteration == 1 and run.config.model.num_layers == sizes[0]
    assert run.config.model.num_attention_heads == sizes[3] * sizes[4]


def test_bad_input_is_named(roots: dict[str, Path], tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "titles.jsonl").write_text('{"text": "5 6"}\n{"title": "x"}\n')
    (tmp_path / "broken.jsonl").write_text('{"text": "5 6"}\n{"text": \n')
    train_tiny("--num-experts", "2", "--save", tmp_path / "experts", "--train-iters", "1")
    for source, flags, said in (
        (roots["gpt"], "", "nothing would be removed"),
        (roots["gpt"], "--ffn-hidden-size 21", "the model has 20"),
        (roots["gpt"], "--hidden-size 20", "normalization LayerNorm subtracts a mean"),
        (roots["llama"], "--num-attention-heads 6", "give a multiple of 4"),
        (roots["llama"], "--num-layers 0", "must be at least 1"),
        (roots["gpt"], f"--num-layers 2 --data {tmp_path / 'titles.jsonl'}", "titles.jsonl, line 2: has neither"),
        (roots["gpt"], f"--num-layers 2 --data {tmp_path / 'broken.jsonl'}", "broken.jsonl, line 2: not JSON"),
        (roots["gpt"], f"--num-layers 2 --data {tmp_path / 'none.jsonl'}", "none.jsonl: no such file; give one"),
        (tmp_path / "experts", "--num-layers 1", "cannot be pruned; only"),
    ):
        capsys.readouterr()
        assert prune(source, tmp_path / "pruned", flags) == 2
        assert said in capsys.readouterr().err
    assert {entry.name for entry in tmp_path.iterdir()} == {"titles.jsonl", "broken.jsonl", "experts"}

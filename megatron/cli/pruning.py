# SPDX-License-Identifier: Apache-2.0
"""The work of `megatron prune`: measure a checkpoint's model, write the parts that stay, and compare the two."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from megatron.core.config_base import get_settings
from megatron.core.errors import CheckpointError, ConfigError
from megatron.core.flag_texts import layer_pattern
from megatron.core.placement import Placement, get_placement
from megatron.core.post_training.pruning import (
    Importance,
    KeptParts,
    ModelSizes,
    choose_kept,
    find_axes,
    prune,
    rename,
    zero_removed,
)
from megatron.core.progress import CountedProgress
from megatron.core.stacked_parameters import list_parameters
from megatron.hf.checkpoints import DeferredTensor, OpenCheckpoint, fresh_directory, write_checkpoint
from megatron.training.checkpoint.trained_model import load_trained_model
from megatron.training.config.container import RunConfig

_TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Largest difference of logits, as a share of the largest one, by the weights' dtype: norms are rounded once more."""


class PruningSource:
    """A checkpoint that is to be pruned. Raises CheckpointError, and ConfigError for a model that cannot be."""

    def __init__(self, root: Path, iteration: int | None) -> None:
        self.checkpoint = OpenCheckpoint(root, iteration)
        self.config = self.checkpoint.read_config()
        model = self.config.model
        self.sizes = ModelSizes(
            model.num_layers, model.hidden_size or 0, model.ffn_hidden_size or 0, model.num_attention_heads,
            model.num_query_groups or 0, model.kv_channels or 0, model.gated_linear_unit,
        )  # fmt: skip
        for name in self.checkpoint.contents:
            find_axes(name, self.checkpoint.read_shape(name), self.sizes)
        self.whole = load_trained_model(self.checkpoint.path)


def prune_checkpoint(source: PruningSource, wanted: ModelSizes, samples: Sequence[Sequence[int]], output: Path) -> str:
    """Write the parts of a model that matter most on some texts as the new directory of checkpoints `output`.

    samples: tokens of each text. Returns the sentence to print. Raises ConfigError for sizes that cannot be, and
    CheckpointError where the result does not compute what it should; `output` then does not exist.
    """
    full = source.sizes
    with fresh_directory(output, "--save") as temporary:
        importance = measure(source.whole.model, full, samples)
        kept = choose_kept(importance, full, wanted)
        config = build_config(source.config, kept, full, wanted)
        write(source.checkpoint, temporary, config, kept, full)
        verified = verify(temporary, source, kept, samples[0])
    layers = " ".join(map(str, kept.layers.tolist()))
    return f"{verified}\nlayers {layers} of {full.layers} stay\nwrote {output}"


class ImportanceMeter:
    """Adds up the importance of a model's parts in each of its passes, until the block ends."""

    def __init__(self, model: nn.Module, full: ModelSizes) -> None:
        self._full, self._tokens = full, 0
        self._layers = torch.zeros(full.layers, dtype=torch.float64)
        self._ffn = torch.zeros(full.layers, full.ffn, dtype=torch.float64)
        self._heads = torch.zeros(full.layers, full.heads, dtype=torch.float64)
        self._hidden = torch.zeros(full.hidden, dtype=torch.float64)
        decoder: Any = model.decoder
        self._hooks = [decoder.final_layernorm.register_forward_hook(self._add_hidden)]
        for number, layer in enumerate(decoder.layers):
            # What comes in is copied: the layer may add to it in its place.
            inputs: list[Tensor] = []
            add = functools.partial
            self._hooks += [
                layer.register_forward_pre_hook(lambda _, given, inputs=inputs: inputs.append(given[0].clone())),
                layer.register_forward_hook(add(self._add_layer, number, inputs)),
                layer.mlp.linear_fc2.register_forward_pre_hook(add(self._add_channels, number)),
                layer.self_attention.linear_proj.register_forward_pre_hook(add(self._add_heads, number)),
                layer.input_layernorm.register_forward_hook(self._add_hidden),
                layer.pre_mlp_layernorm.register_forward_hook(self._add_hidden),
            ]

    def __enter__(self) -> ImportanceMeter:
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def importance(self) -> Importance:
        """Means over all tokens so far."""
        return Importance(*(each / self._tokens for each in (self._layers, self._ffn, self._heads, self._hidden)))

    def _add_layer(self, number: int, inputs: list[Tensor], _: nn.Module, __: object, output: Any) -> None:
        before, after = inputs.pop(), output[0] if isinstance(output, tuple) else output
        self._layers[number] += (1 - cosine_similarity(before.double(), after.double(), dim=-1)).sum().cpu()
        self._tokens += before[..., 0].numel() if number == 0 else 0

    def _add_channels(self, number: int, linear: Any, inputs: tuple[Tensor]) -> None:
        active = inputs[0].double().abs().flatten(0, -2).sum(0)
        self._ffn[number] += (active * linear.weight.double().norm(dim=0)).cpu()

    def _add_heads(self, number: int, linear: Any, inputs: tuple[Tensor]) -> None:
        context = inputs[0].flatten(0, -2).unflatten(1, (self._full.heads, -1))
        weight = linear.weight.unflatten(1, (self._full.heads, -1))
        for head in range(self._full.heads):
            self._heads[number, head] += (context[:, head] @ weight[:, head].T).norm(dim=-1).double().sum().cpu()

    def _add_hidden(self, _: nn.Module, __: object, output: Any) -> None:
        normed: Tensor = output[0] if isinstance(output, tuple) else output
        self._hidden += normed.double().abs().flatten(0, -2).sum(0).cpu()


def compute_logits(model: nn.Module, tokens: Sequence[int]) -> Tensor:
    """Logits [1, s, v] of a text."""
    device = next(model.parameters()).device
    ids = torch.tensor([tokens], device=device)
    with torch.no_grad():
        logits: Tensor = model(ids, torch.arange(len(tokens), device=device)[None], None)
    return logits


def measure(model: nn.Module, full: ModelSizes, samples: Sequence[Sequence[int]]) -> Importance:
    """The importance of the model's parts on some texts."""
    progress = CountedProgress("importance", len(samples), "texts")
    with ImportanceMeter(model, full) as meter:
        for tokens in samples:
            compute_logits(model, tokens)
            progress.add()
    return meter.importance


def build_config(config: RunConfig, kept: KeptParts, full: ModelSizes, wanted: ModelSizes) -> RunConfig:
    """The settings of the pruned model. Raises ConfigError where they cannot be."""
    model, changes = config.model, dict[str, Any]()
    if wanted.layers < full.layers:
        # Lists with an entry for each layer.
        for name, setting in get_settings(type(model)).items():
            value = getattr(model, name)
            if setting.parse is not layer_pattern or value is None or name == "moe_layer_freq":
                continue
            if isinstance(value, int):
                raise ConfigError(
                    f"{model.say(name)} goes by a layer's number, which pruning changes; keep all layers, or "
                    "prune a model that has a list of them"
                )
            changes[name] = [value[layer] for layer in kept.layers.tolist()]
    if wanted.hidden < full.hidden:
        if model.normalization != "RMSNorm":
            raise ConfigError(
                f"--hidden-size {wanted.hidden}: {model.say('normalization')} subtracts a mean over all channels, so "
                "that none can go; leave the flag out"
            )
        changes["layernorm_epsilon"] = model.layernorm_epsilon * full.hidden / wanted.hidden
    return config.with_groups(
        model=model.on_one_process(
            num_layers=wanted.layers, hidden_size=wanted.hidden, ffn_hidden_size=wanted.ffn,
            num_attention_heads=wanted.heads, num_query_groups=wanted.groups, kv_channels=full.head_width, **changes,
        )
    )  # fmt: skip


def write(checkpoint: OpenCheckpoint, root: Path, config: RunConfig, kept: KeptParts, full: ModelSizes) -> None:
    """Write the pruned checkpoint into a directory."""
    offset = 1.0 if config.model.layernorm_zero_centered_gamma else 0.0

    def make(name: str) -> Tensor:
        return prune(name, checkpoint.read(name), kept, full, offset)

    tensors = {}
    for name, stored in checkpoint.contents.items():
        new_name = rename(name, kept)
        if new_name is None:
            continue
        shape = tuple(prune(name, torch.empty(checkpoint.read_shape(name), device="meta"), kept, full).shape)
        valid_rows = checkpoint.valid_rows.get(name)
        placement = Placement(new_name, shape, valid_rows=valid_rows)
        tensors[new_name] = DeferredTensor.of(placement, stored.dtype, functools.partial(make, name))
    files = checkpoint.found.manifest.files
    attachments = {name: checkpoint.path / name for name in files if "/" in name}
    write_checkpoint(root, tensors, config, attachments)


def verify(pruned: Path, source: PruningSource, kept: KeptParts, tokens: Sequence[int]) -> str:
    """Compare the pruned model's logits with the whole one's, whose removed parts become zero; the sentence to print.

    Raises CheckpointError where they differ.
    """
    whole = source.whole
    for name, parameter in list_parameters(whole.model):
        zero_removed(get_placement(parameter, name).name, parameter.data, kept, source.sizes)
    found = compute_logits(load_trained_model(pruned).model, tokens)[..., : whole.vocab_size]
    expected = compute_logits(whole.model, tokens)[..., : whole.vocab_size]
    largest, difference = expected.abs().max().item(), (found - expected).abs().max().item()
    # A comparison with NaN is false, so NaN counts as different here.
    dtype = next(iter(source.checkpoint.contents.values())).dtype
    if not difference <= _TOLERANCE[dtype] * max(1.0, largest):
        raise CheckpointError(
            f"logits of the pruned model differ by {difference:.2e} from those, up to {largest:.3g}, of the whole one "
            "with zeros in place of what was removed: this model cannot be pruned in these sizes"
        )
    return (
        f"verified: logits, up to {largest:.3g}, differ by at most {difference:.1e} from the whole model's with zeros"
    )

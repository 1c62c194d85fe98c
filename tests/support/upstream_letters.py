# SPDX-License-Identifier: Apache-2.0
"""The writer of upstream's checkpoints (upstream_files.py) for hybrids: layers by letters, as its hybrid stack has them
with Transformer Engine, its only layers for letters."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tests.support.upstream_files import Writer

# Behind a layer's number: upstream's names in the order of its modules, and ours where they are others.
_IN_LAYERS: dict[str, dict[str, str | None]] = {
    "M": {
        "mixer.conv1d_weight": "mixer.conv1d.weight", "mixer.conv1d_bias": "mixer.conv1d.bias", "mixer.dt_bias": None,
        "mixer.A_log": None, "mixer.D": None, "mixer.in_proj.layer_norm_weight": "input_layernorm.weight",
        "mixer.in_proj.weight": None, "mixer.norm.weight": None, "mixer.out_proj.weight": None,
    },
    "G": {
        "self_attention.dt_bias": None, "self_attention.A_log": None,
        "self_attention.in_proj.layer_norm_weight": "input_layernorm.weight", "self_attention.in_proj.weight": None,
        "self_attention.conv1d.weight": None, "self_attention.out_norm.weight": None,
        "self_attention.out_proj.weight": None,
    },
    "*": {
        "self_attention.linear_proj.weight": None,
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "self_attention.linear_qkv.weight": None,
    },
    "-": {
        "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight", "mlp.linear_fc1.weight": None,
        "mlp.linear_fc2.weight": None,
    },
}  # fmt: skip
_BY_ROWS = (".in_proj.weight", ".conv1d.", ".dt_bias", ".A_log", "mixer.D", "mixer.norm.weight")


@dataclass(frozen=True)
class LetterWriter(Writer):
    """A hybrid in a layout of upstream's. Experts (E) are those of Writer, in grouped layers."""

    letters: str = ""
    prediction: str = ""
    """The letters of a depth of multi-token prediction."""
    sections: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """By mixer and self_attention: the rows of each section of a first projection."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """More of upstream's."""
    te: bool = True
    biases: bool = False
    tied: bool = False
    positions: bool = False
    norm_bias: bool = False
    grouped: bool = True

    def args(self, **more: Any) -> Namespace:
        """See Writer."""
        stages = "|".join(self.letters[layers.start : layers.stop] for _, _, layers in self.chunks())
        pattern = stages + f"/{self.prediction}" * self.predictions
        known = {"hybrid_layer_pattern": pattern, "is_hybrid_model": True, "mtp_num_layers": self.predictions or None}
        return super().args(**known, **self.settings, **more)

    def in_decoder_layer(self, layer: int, ep_rank: int) -> Iterator[tuple[str, str, int | None]]:
        """See Writer."""
        return self._in_letter(self.letters[layer], ep_rank)

    def in_prediction_layer(self, ep_rank: int) -> Iterator[tuple[str, str, int | None]]:
        """See Writer."""
        for number, letter in enumerate(self.prediction):
            for theirs, ours, expert in self._in_letter(letter, ep_rank):
                yield f"layers.{number}.{theirs}", f"layers.{number}.{ours}", expert

    def final_norms(self) -> list[str]:
        """See Writer."""
        return ["decoder.final_norm.weight"]

    def _in_letter(self, letter: str, ep_rank: int) -> Iterator[tuple[str, str, int | None]]:
        if letter != "E":
            for theirs, ours in _IN_LAYERS[letter].items():
                yield theirs, ours or theirs, None
            return
        for name in ("pre_mlp_layernorm.weight", "mlp.router.weight"):
            yield name, name, None
        here = self.experts // self.ep
        for layer in ("linear_fc1", "linear_fc2"):
            for number in range(here):
                yield f"mlp.experts.{layer}.weight{number}", f"mlp.experts.{layer}.weight", ep_rank * here + number

    def rows(self) -> list[str]:
        """See Writer."""
        return [*super().rows(), *_BY_ROWS]

    def parts(self, name: str, tensor: Tensor) -> tuple[Tensor, ...]:
        """See Writer."""
        found = self._sections(name)
        return tensor.split(list(found.values())) if found else super().parts(name, tensor)

    def _sections(self, name: str) -> dict[str, int]:
        """The rows of each section of a tensor that has several."""
        mixer, _, rest = name.rpartition(".in_proj." if ".in_proj." in name else ".conv1d.")
        if rest not in ("weight", "bias"):
            return {}
        sections = self.sections[mixer.rpartition(".")[2]]
        convolved = {"x", "B", "C", "query", "key", "value"}
        return {part: size for part, size in sections.items() if ".in_proj." in name or part in convolved}

    def as_saved(self, name: str, tensor: Tensor) -> Iterator[tuple[str, int | None, Tensor]]:
        """See Writer: keys have the layer's number."""
        key = name.replace("mlp.experts.", "mlp.experts.experts.")
        for names in _IN_LAYERS.values():
            for theirs, ours in names.items():
                start, _, layer = name.rpartition(f".{ours}")
                if ours is not None and not layer and start and ours.endswith("norm.weight"):
                    letter = self._letter_of(start)
                    key = f"{start}.{theirs}" if theirs in _IN_LAYERS.get(letter, {}) else key
        sections = self._sections(name)
        if not sections:
            yield key, None, tensor
        for section, values in zip(sections, tensor.split(list(sections.values())), strict=True) if sections else ():
            yield f"{key}.{section}", None, values

    def _letter_of(self, layer: str) -> str:
        number = int(layer.rpartition(".")[2])
        return (self.prediction if layer.startswith("mtp.") else self.letters)[number]

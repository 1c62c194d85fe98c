# SPDX-License-Identifier: Apache-2.0
"""Choice of the matrix products that are computed in 8 or 4 bits, and of their scales."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.core.config_base import flag
from megatron.core.setting import Needs
from megatron.core.transformer.config_fields.architecture import ArchitectureFields

# What a flag needs to have an effect: without it, a note says that it has none.
_FP8 = Needs("--fp8-format", lambda run: run.fp8 is not None)
_FP4 = Needs("--fp4-format", lambda run: run.fp4 is not None)
_FEW_BITS = Needs("--fp8-format or --fp4-format", lambda run: run.fp8 is not None or run.fp4 is not None)
_DELAYED = Needs("--fp8-recipe delayed", lambda run: run.fp8_recipe == "delayed")
_BF16_LAYERS = Needs("--first-last-layers-bf16", lambda run: run.first_last_layers_bf16)

ATTENTION_LAYERS = ("qkv", "proj", "q_proj", "q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj")
_MLP = ("mlp", "mlp.experts", "mlp.shared_experts")
LINEAR_LAYERS = (
    *(f"self_attention.linear_{name}" for name in ATTENTION_LAYERS),
    *(f"{mlp}.linear_{name}" for mlp in _MLP for name in ("fc1", "fc2")),
    *("mlp.fc1_latent_proj", "mlp.fc2_latent_proj"),
)
"""The linear layers that a transformer layer may have, by their names in it."""

# A block of one scale is never cut in two; of recipes with one scale per tensor GPU kernels read 16 values at a time.
MULTIPLES = {"delayed": 16, "tensorwise": 16, "rowwise": 16, "blockwise": 128, "mxfp8": 32, "nvfp4": 16}
"""Recipe -> what the widths of linear layers must be multiples of."""
LAST_BLOCK = 16
"""Divisor of the width of the last of several blocks of 128 columns, where no ranks share the columns."""


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class PrecisionFields(ArchitectureFields):
    """Training in FP8 (Micikevicius et al., 2022) and NVFP4 (NVIDIA, 2025); docs/fp8.md."""

    fp8: Literal["e4m3", "hybrid"] | None = flag(None, names=("--fp8-format",), kind="numerics")
    """Multiply in FP8 in the linear layers and experts of all transformer layers. e4m3: all operands; hybrid: output
    gradients in e5m2, which has more range and less precision. Weights, gradients and everything else keep their
    dtypes."""
    fp8_recipe: Literal["tensorwise", "delayed", "mxfp8", "blockwise", "rowwise", "custom"] = flag(
        "delayed", unsupported_choices=("custom",), kind="numerics", needs=_FP8
    )
    """Source of the operands' scales. delayed: from the largest values of earlier steps; tensorwise: from the
    operand's; blockwise: for each 128 values along the sum, and each 128 x 128 of a weight, a power of two; mxfp8: for
    each 32 values along the sum, a power of two; rowwise: for all values of a sum, a power of two."""
    fp8_margin: int = flag(0, minimum=0, maximum=64, kind="numerics", needs=(_FP8, _DELAYED))
    """Bits of room: scales are divided by two to this power, against values that grow between steps."""
    fp8_interval: int = flag(1, minimum=1, unit="steps", kind="numerics", needs=(_FP8, _DELAYED))
    """Compute scales again every so many steps; largest values are noted in each."""
    fp8_amax_history_len: int = flag(1, minimum=1, maximum=2**20, unit="steps", kind="numerics", needs=(_FP8, _DELAYED))
    """Steps of which the largest value of each operand is remembered."""
    fp8_amax_compute_algo: Literal["most_recent", "max"] = flag("most_recent", kind="numerics", needs=(_FP8, _DELAYED))
    """Choice of the scale among the remembered largest values: the last step's, or the largest."""
    fp8_wgrad: bool = flag(
        True,
        names=("--fp8-wgrad",),
        off_names=("--no-fp8-wgrad", "--disable-fp8-wgrad"),
        kind="numerics",
        needs=_FEW_BITS,
    )
    """Compute weight gradients in FP8 or FP4, too; switched off, from the operands as they were before rounding."""
    fp8_output_proj: bool = flag(False, kind="numerics", needs=_FP8)
    """Multiply in FP8 in the output layer, too."""
    fp8_emulation: bool = flag(False, kind="kernel", needs=_FEW_BITS)
    """On a GPU, compute FP8 and FP4 products in float32 from the same 8-bit or 4-bit values: for GPUs without products
    of the recipe. Slower than bfloat16; a CPU does so anyway."""
    fp8_param_gather: bool = flag(False, kind="kernel")
    """Gather parameters in FP8. Here they are gathered in the model's dtype, as a note says."""
    fp4: Literal["e2m1"] | None = flag(None, names=("--fp4-format",), kind="numerics")
    """Multiply in FP4, instead of FP8, in the linear layers and experts of all transformer layers."""
    fp4_recipe: Literal["nvfp4", "custom"] = flag("nvfp4", unsupported_choices=("custom",), kind="numerics", needs=_FP4)
    """Source of the operands' scales. nvfp4: for each 16 values along the sum, and each 16 x 16 of a weight, 8
    bits, and one for the matrix; output gradients are rounded at random, and the operands of weight gradients are
    transformed before."""
    fp4_param_gather: bool = flag(False, kind="kernel")
    """Gather parameters in FP4. Here they are gathered in the model's dtype, as a note says."""
    first_last_layers_bf16: bool = flag(False, kind="numerics", needs=_FEW_BITS)
    """Leave the first and last layers out of FP8 or FP4."""
    num_layers_at_start_in_bf16: int = flag(
        1, minimum=0, unit="layers", kind="numerics", needs=(_FEW_BITS, _BF16_LAYERS)
    )
    """With --first-last-layers-bf16, layers at the beginning."""
    num_layers_at_end_in_bf16: int = flag(1, minimum=0, unit="layers", kind="numerics", needs=(_FEW_BITS, _BF16_LAYERS))
    """With --first-last-layers-bf16, layers at the end."""

    fp8_bf16_layers: list[str] | None = flag(None, nargs="+", metavar="PATTERN", kind="numerics", needs=_FEW_BITS)
    """Leave linear layers out of FP8 or FP4 whose names, as --log-fp8-stats has them, match one of these patterns:
    *.linear_fc2, decoder.layers.0.*"""
    fp8_fallback_sqnr: float | None = flag(None, minimum=0, unit="dB", kind="numerics", needs=_FEW_BITS)
    """Compute a linear layer in bfloat16 from the --log-interval on in which rounding any of its operands leaves a
    ratio of signal to noise below this, and say so; it stays so until the run ends, and when it goes on."""

    log_fp8_stats: bool = flag(False, kind="report", needs=_FEW_BITS)
    """Log how well each operand of FP8 or FP4 products survives: the ratio of signal to quantisation noise in dB, the
    largest absolute value, and the shares of values that are cut off or become zero."""

    @property
    def few_bits_recipe(self) -> str | None:
        """The recipe of products in 8 or 4 bits; None in a run without."""
        if self.fp4 is not None:
            return self.fp4_recipe
        return None if self.fp8 is None else self.fp8_recipe

    @property
    def rounded_input_bytes(self) -> float | None:
        """Bytes of one value of a linear layer's input as it is saved for backward in 8 or 4 bits, with its share of a
        scale; None where weight gradients are computed from inputs as they were, or round them again."""
        recipe = self.few_bits_recipe
        # Without fp8_wgrad, backward multiplies by the input as it was, which is kept in place of the rounded one.
        if recipe is None or recipe == "rowwise" or not self.fp8_wgrad:
            return None
        return {"blockwise": 1 + 1 / 128, "mxfp8": 1 + 1 / 32, "nvfp4": (1 + 1 / 8) / 2}.get(recipe, 1.0)

    @property
    def multiplies_few_bits_natively(self) -> bool:
        """True if products in 8 bits run on a kernel of the device, False where they are emulated in float32."""
        return self.few_bits_recipe in ("delayed", "tensorwise") and not self.fp8_emulation

    @property
    def rounded_weight_bytes(self) -> float:
        """Bytes of one value of a linear layer's weight that is rounded once a step, with its share of a scale; 0 where
        each product rounds it again."""
        return {"delayed": 1.0, "tensorwise": 1.0, "blockwise": 1 + 4 / 128**2, "nvfp4": 1 + 4 / 16**2}.get(
            self.few_bits_recipe or "", 0.0
        )

    def stays_in_bf16(self, layer: str) -> bool:
        """Return whether --fp8-bf16-layers leaves out a linear layer; layer: its name in the whole model."""
        return any(fnmatch.fnmatchcase(layer, pattern) for pattern in self.fp8_bf16_layers or ())

    def rules(self) -> Iterator[str]:
        if self.fp8 is not None and self.fp4 is not None:
            yield f"{self.say('fp8')} and {self.say('fp4')} contradict each other; keep one"
        if self.few_bits_recipe is None:
            return
        # Upstream's rule, kept so that a command line means the same here as there.
        if self.first_last_layers_bf16 and self.few_bits_recipe == "delayed":
            yield (
                "--first-last-layers-bf16 does not work with --fp8-recipe delayed; use tensorwise, blockwise or mxfp8"
            )

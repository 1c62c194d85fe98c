# SPDX-License-Identifier: Apache-2.0
"""Fields of upstream's TransformerConfig that programs in Python give, set or read; no flag sets them.

Fields of a feature that does not exist here take upstream's default, and refuse any other value by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core.config_base import CheckedConfig, derived
from megatron.core.enums import AttnBackend
from megatron.core.model_parallel_config import refuse_missing

_REFUSED: dict[str, tuple[Any, str]] = {
    "fp8_param": (False, "parameters are kept in 16 or 32 bits; fp8 says that products are in 8"),
    "flash_decode": (False, "generation chooses its kernel itself"),
    "test_mode": (False, "there are no tests in a step; python -m megatron check_parity compares layouts"),
    "moe_enable_deepep": (False, "experts exchange tokens by moe_token_dispatcher_type"),
    "heterogeneous_block_specs": (False, "layers of one kind have one shape"),
    "hetereogenous_dist_checkpoint": (False, "layers of one kind have one shape"),
    "use_kitchen": (False, "that package is not used"),
}
"""Name -> upstream's default, and what there is instead."""
_FORMER = {
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
}
"""Upstream's name in Python -> the field."""
_SEVERAL = ("cp_comm_type", "moe_aux_loss_coeff", "moe_router_load_balancing_type")
"""Fields that hold a list, and are given one value."""


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class ProgramFields(CheckedConfig):
    """Fields that users' programs set while they run, and upstream's spellings."""

    num_layers_in_first_pipeline_stage: int | None = derived(kind="layout")
    """decoder_first_pipeline_num_layers under upstream's name in Python."""
    num_layers_in_last_pipeline_stage: int | None = derived(kind="layout")
    """decoder_last_pipeline_num_layers under upstream's name in Python."""
    log_max_attention_logit: bool = derived(False, kind="report")
    """Ignored by a model; --log-max-attention-logit makes a run log it."""
    moe_router_fusion: bool = derived(False, kind="kernel")
    """Ignored: the numbers are the same."""
    cuda_graph_scope: Any = derived(kind="kernel")
    """Ignored: cuda_graph_impl and cuda_graph_modules say what is recorded."""
    inference_rng_tracker: bool = derived(False, kind="kernel")
    """Ignored: sampling draws from a separate generator."""
    config_logger_dir: str | None = derived("", kind="report")
    """Directory of `log_config_to_disk`, which programs' models call; empty for none."""
    transformer_impl: str = derived("transformer_engine", kind="kernel")
    """Ignored by a model, whose layer spec says it; programs read which spec they are to ask for."""
    fp8_param: bool = derived(False, kind="numerics")
    """Only False."""
    flash_decode: bool = derived(False, kind="kernel")
    """Only False."""
    test_mode: bool = derived(False, kind="report")
    """Only False."""
    mrope_section: list[int] | None = derived(kind="function")
    """Pairs of channels that turn by positions of time, of height and of width (M-RoPE, Qwen2-VL)."""
    moe_enable_deepep: bool = derived(False, kind="kernel")
    """Only False."""
    heterogeneous_block_specs: bool = derived(False, kind="function")
    """Only False."""
    hetereogenous_dist_checkpoint: bool = derived(False, kind="layout")
    """Only False; the spelling is upstream's."""
    use_kitchen: bool = derived(False, kind="kernel")
    """Only False."""

    def normalize(self) -> None:
        super().normalize()
        # Again: the field may have been set after its other name, or past __setattr__.
        for name in ("attention_backend", *_SEVERAL, *_FORMER):
            setattr(self, name, getattr(self, name))

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field, from a constructor or later: a member of AttnBackend by its name, with which everything here
        compares; one of several as a list; a first or last stage's layers under both names."""
        if isinstance(value, AttnBackend):
            value = value.name
        elif name in _SEVERAL and isinstance(value, str | float | int):
            value = [value]
        super().__setattr__(name, value)
        if name in _FORMER and value is not None:
            super().__setattr__(_FORMER[name], value)

    def rules(self) -> Iterator[str]:
        yield from refuse_missing(self, _REFUSED)
        sections = self.mrope_section
        if sections is not None and [type(one) for one in sections] != [int, int, int]:
            yield f"mrope_section is {sections!r}; give three numbers of pairs of channels, such as [16, 24, 24]"

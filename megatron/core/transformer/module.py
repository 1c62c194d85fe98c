"""The base of every module of a transformer: it knows its config."""

from __future__ import annotations

from torch import nn

from megatron.core.transformer.transformer_config import TransformerConfig


class MegatronModule(nn.Module):
    """An nn.Module with the TransformerConfig it was built from."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config

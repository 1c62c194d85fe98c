# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from megatron.core.transformer.module import MegatronModule as MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec as ModuleSpec, build_module as build_module
from megatron.core.transformer.transformer_block import TransformerBlock as TransformerBlock
from megatron.core.transformer.transformer_config import MLATransformerConfig as MLATransformerConfig, TransformerConfig as TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer as TransformerLayer, TransformerLayerSubmodules as TransformerLayerSubmodules
__all__ = ['MegatronModule', 'ModuleSpec', 'TransformerBlock', 'TransformerConfig', 'TransformerLayer', 'TransformerLayerSubmodules', 'build_module']

# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from megatron.core.transformer.transformer_layer import TransformerLayer as MLPLayer

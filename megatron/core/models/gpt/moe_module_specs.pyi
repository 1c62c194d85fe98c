# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from megatron.core.models.gpt.gpt_layer_specs import get_moe_module_spec as get_moe_module_spec
from megatron.core.transformer.mlp import MLPSubmodules as MLPSubmodules

# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from megatron.core.models.hybrid.hybrid_layer_specs import mamba_inference_stack_spec as mamba_inference_stack_spec, mamba_stack_spec as mamba_stack_spec

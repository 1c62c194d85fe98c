# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from megatron.core.upstream.modules import unwrap_model as unwrap_model
from megatron.core.upstream.pipelines import is_vp_first_stage as is_vp_first_stage, is_vp_last_stage as is_vp_last_stage

# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from megatron.core.upstream.specs import get_gpt_modelopt_spec as get_gpt_modelopt_spec

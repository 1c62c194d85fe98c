# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from megatron.core.pipeline_parallel.forward_backward import get_forward_backward_func as get_forward_backward_func
__all__ = ['get_forward_backward_func']

# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from megatron.core.upstream.fusions import bias_dropout_add_fused_train as bias_dropout_add_fused_train, get_bias_dropout_add as get_bias_dropout_add

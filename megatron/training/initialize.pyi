# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from megatron.training.upstream.batches import _initialize_tp_communicators as _initialize_tp_communicators
from megatron.training.upstream.settings import initialize_megatron as initialize_megatron

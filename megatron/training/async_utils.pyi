# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from megatron.training.upstream.batches import _async_calls_queue as _async_calls_queue
from megatron.training.upstream.checkpoints import maybe_finalize_async_save as maybe_finalize_async_save

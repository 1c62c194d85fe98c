# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from megatron.core.dist_checkpointing.async_requests import AsyncCallsQueue as AsyncCallsQueue, AsyncRequest as AsyncRequest

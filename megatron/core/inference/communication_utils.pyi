# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from megatron.core.upstream.process_tools import broadcast_from_last_pipeline_stage as broadcast_from_last_pipeline_stage, recv_from_prev_pipeline_rank_ as recv_from_prev_pipeline_rank_, send_to_next_pipeline_rank as send_to_next_pipeline_rank

# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from megatron.training.upstream.settings import report_theoretical_memory as report_theoretical_memory

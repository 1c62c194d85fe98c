# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from megatron.core.upstream.process_tools import has_config_logger_enabled as has_config_logger_enabled, log_config_to_disk as log_config_to_disk

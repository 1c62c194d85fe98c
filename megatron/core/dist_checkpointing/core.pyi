# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from megatron.core.upstream.checkpoints import CheckpointingConfig as CheckpointingConfig, maybe_load_config as maybe_load_config, save_config as save_config

# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from megatron.training.upstream.settings import gpt_config_from_args as gpt_config_from_args, pretrain_cfg_container_from_args as pretrain_cfg_container_from_args

# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from megatron.training.upstream.settings import core_transformer_config_from_yaml as core_transformer_config_from_yaml

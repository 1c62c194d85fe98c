# SPDX-License-Identifier: Apache-2.0
"""What a server that tests fork processes from does once, so that no process need: imports, and the table of flags.

Importing this module starts no thread and draws no random number, so that a forked process begins as a fresh one would.
"""

from __future__ import annotations

import importlib

from megatron.training.flags.declarations import flags_by_spelling
from megatron.training.flags.flag import formers_by_name

MODULES = """
    torch.distributed.fsdp torch.distributed.checkpoint numpy.random pretrain_gpt
    megatron.core.datasets.blended_megatron_dataset_builder
    megatron.core.datasets.gpt_dataset
    megatron.core.models.gpt.gpt_layer_specs
    megatron.core.models.gpt.gpt_model
    megatron.core.tokenizers.null
    megatron.core.transformer.core_attention.select
    megatron.training.recipes.gpt
    megatron.training.recipes.gpt_data
    megatron.training.verify.comparison
    megatron.training.verify.parity
    megatron.training.training
"""

for module in MODULES.split():
    importlib.import_module(module)
flags_by_spelling()
formers_by_name()

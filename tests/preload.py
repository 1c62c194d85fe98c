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
    megatron.hf.running
    megatron.cli.summary
    megatron.core.datasets.blended_megatron_dataset_builder
    megatron.core.datasets.fim_dataset
    megatron.core.datasets.gpt_dataset
    megatron.core.datasets.sft_dataset
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


def build_mock_indices(sequence_length: int) -> None:
    """Those of --mock-data, which each process would spend a tenth of a second or two on; the dataset keeps them."""
    from megatron.core.tokenizers.null import NullTokenizer
    from megatron.training.flags.read import read_run_config
    from megatron.training.recipes.gpt_data import build_gpt_datasets

    lengths = [f"--{name}={sequence_length}" for name in ("seq-length", "max-position-embeddings")]
    config = read_run_config([*_MODEL.split(), *lengths], {})
    build_gpt_datasets(config, NullTokenizer(60), (4, 0, 0))


_MODEL = """--num-layers 1 --hidden-size 8 --num-attention-heads 1 --micro-batch-size 1 --train-iters 1 --lr 1
    --mock-data --tokenizer-type NullTokenizer --vocab-size 60"""
# Of tests/parallel/small_training.py and tests/functional/pretrain_runs.py.
for number in (16, 32):
    build_mock_indices(number)

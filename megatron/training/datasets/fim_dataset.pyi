# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from megatron.core.datasets.fim_dataset import GPTFIMDataset as GPTFIMDataset, GPTFIMDatasetConfig as GPTFIMDatasetConfig

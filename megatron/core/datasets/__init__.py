# SPDX-License-Identifier: Apache-2.0
"""From token files to training samples.

indexed_format      what the bytes of .bin/.idx mean, and the check that they hold together
checksums           PREFIX.sum, optional: find flipped bits
indexed_dataset     read and write .bin/.idx
object_storage      s3:// and the like: a local copy of the index, tokens read block by block
merging             datasets one after another, as one
inspection          what is in a dataset: statistics, ids outside a vocabulary
blend               which datasets, in which proportions, split how: --data-path and --split
index_builders      which tokens make sample i: pure numpy
blending_order      which dataset each sample of a blend comes from: pure numpy
sequence_counts     what many index files say, so that a job starts without opening them
index_cache         keep those indices on disk, safely
megatron_dataset    the base of a dataset: one source, one split; its settings in blended_megatron_dataset_config
gpt_dataset         sample i as tensors; mock data
fim_dataset         the same with documents rearranged for fill-in-the-middle
sft_dataset         JSONL files of chat messages, several conversations packed into a sequence, as tensors
blended_dataset     several datasets, interleaved by weight
blended_megatron_dataset_builder    the whole of it: prefixes and sizes in, (train, valid, test) out
preprocessing       from text to token files
"""

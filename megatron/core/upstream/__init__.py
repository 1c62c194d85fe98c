# SPDX-License-Identifier: Apache-2.0
"""Upstream's names: for programs that were written for Megatron-LM. Nothing inside megatron/ imports this room.

names, table    which names stand where (one table), and what is said of those that do not exist
modules         wrappers, identities, specs by name
layers          which layers a stage has; which experts a router chooses
batches         batches of a rank; the number of microbatches
functions       marks on functions, versions, arithmetic
checkpoints     formats and strategies beside dist_checkpointing.save and load
tokenizers      MegatronTokenizer
"""

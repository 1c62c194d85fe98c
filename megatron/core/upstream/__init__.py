# SPDX-License-Identifier: Apache-2.0
"""Upstream's names: for programs that were written for Megatron-LM. Nothing inside megatron/ imports this room.

names           the finder, and how its tables are read
table, refused  which names stand where, and what is said of those that have nothing behind them or do not exist
modules         models inside their wrappers
layers          which layers a stage has; which experts a router chooses
batches         batches of a rank; the number of microbatches
functions       marks on functions, arithmetic
checkpoints     formats and strategies beside dist_checkpointing.save and load
tokenizers      MegatronTokenizer
process_tools   versions, ranges in profiles, groups, sends between stages
configs, experts, fusions, losses, optimizers, pipelines, sharded, specs, watching: functions and classes of those parts
"""

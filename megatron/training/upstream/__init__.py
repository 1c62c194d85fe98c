# SPDX-License-Identifier: Apache-2.0
"""Upstream's names of the training program, for users' loops. Nothing inside megatron/ imports this package.

table           which names stand where; see megatron.core.upstream.names
settings        arguments and globals: set_args, initialize_megatron, validate_args, ...
steps           get_model, setup_model_and_optimizer, train_step, evaluation, logging
checkpoints     save_checkpoint, load_checkpoint, names of files
"""

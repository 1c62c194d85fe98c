# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from megatron.training.global_vars import get_args as get_args, get_timers as get_timers, get_tokenizer as get_tokenizer, print_rank_0 as print_rank_0
from megatron.training.training import pretrain as pretrain
from megatron.training.upstream.settings import get_train_valid_test_num_samples as get_train_valid_test_num_samples, initialize_megatron as initialize_megatron, is_last_rank as is_last_rank, print_rank_last as print_rank_last
from megatron.training.upstream.steps import get_model as get_model
__all__ = ['get_args', 'get_timers', 'get_tokenizer', 'pretrain', 'print_rank_0']

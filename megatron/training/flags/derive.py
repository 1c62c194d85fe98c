"""Values that follow from others, so that a user need not repeat himself; what upstream does after parsing.

Every function fills in a subject's missing values and notes what a user may not expect. None refuses anything.
"""

from __future__ import annotations

from megatron.core.errors import ConfigError
from megatron.core.flag_texts import decimal
from megatron.core.num_microbatches_calculator import parse_step_schedule
from megatron.core.transformer.pipeline_layout import layout_stages
from megatron.training.flags.fully_sharded import derive_sharding
from megatron.training.flags.idle_flags import note_idle_flags
from megatron.training.flags.settings import Settings


def derive(s: Settings) -> None:
    """All derived values, in the order in which they depend on each other."""
    _layout(s)
    _batch(s)
    _model(s)
    _attention(s)
    _precision(s)
    _experts(s)
    _optimizer(s)
    _data(s)
    _checkpoint(s)
    note_idle_flags(s)


def _layout(s: Settings) -> None:
    model_processes = s.tensor_model_parallel_size * s.pipeline_model_parallel_size * s.context_parallel_size
    if s.world_size % model_processes == 0:
        s.data_parallel_size = s.world_size // model_processes
    if s.sequence_parallel and s.tensor_model_parallel_size == 1:
        s.note("--sequence-parallel has no effect with --tensor-model-parallel-size 1")
        s.derive(sequence_parallel=False)
    if s.expert_tensor_parallel_size is None:
        s.derive(expert_tensor_parallel_size=s.tensor_model_parallel_size)
    s.derive(virtual_pipeline_model_parallel_size=_virtual_stages(s))
    if s.overlap_p2p_comm_warmup_flush:
        s.note("--overlap-p2p-communication-warmup-flush has no effect: transfers overlap in every phase already")
    if "use_layer_wise_param_layout" in s.given:
        s.note(
            "--use-layer-wise-param-layout has no effect: matrices that lie on a cut are put together for their update"
        )
    if s.use_gigatoken:
        s.note("--use-gigatoken has no effect here: tools/preprocess_data.py encodes text, training reads token ids")
    if not s.use_gloo_process_groups:
        s.note("--disable-gloo-process-groups has no effect: no groups are made beside those of the run's own backend")


def _virtual_stages(s: Settings) -> int | None:
    """Chunks of layers per pipeline stage; None without the interleaved schedule or where the numbers do not fit."""
    stages, per_chunk, chunks = s.pipeline_model_parallel_size, s.num_layers_per_virtual_pipeline_stage, 1
    if s.num_virtual_stages_per_pipeline_rank:
        chunks = s.num_virtual_stages_per_pipeline_rank
    elif s.pipeline_model_parallel_layout:
        chunks = len(layout_stages(s.pipeline_model_parallel_layout)) // stages
    elif s.pipeline_schedule == "zb-v":
        chunks = 2
    elif per_chunk and s.num_layers and per_chunk > 0 and (s.num_layers // stages) % per_chunk == 0:
        chunks = s.num_layers // stages // per_chunk
    return chunks if chunks > 1 else None


def _batch(s: Settings) -> None:
    if s.micro_batch_size is None:
        s.note("--micro-batch-size is not given; 1 is used")
        s.derive(micro_batch_size=1)
    if isinstance(s.step_batch_size_schedule, list):
        s.derive(step_batch_size_schedule=" ".join(s.step_batch_size_schedule))
    if s.step_batch_size_schedule is not None and "global_batch_size" not in s.given:
        s.derive(global_batch_size=_last_batch_size(s.step_batch_size_schedule))
    elif s.global_batch_size is None and s.data_parallel_size is not None:
        s.derive(global_batch_size=s.micro_batch_size * s.data_parallel_size)
    if s.eval_micro_batch_size is None:
        s.derive(eval_micro_batch_size=s.micro_batch_size)
    if s.eval_global_batch_size is None:
        s.derive(eval_global_batch_size=s.global_batch_size)


def _last_batch_size(schedule: str) -> int | None:
    """The batch a run with a step schedule ends with; None where the schedule cannot be read (a check says so)."""
    try:
        return parse_step_schedule(schedule)[-1].global_batch_size
    except ConfigError:
        return None


def _model(s: Settings) -> None:
    if s.use_rotary_position_embeddings:
        s.derive(position_embedding_type="rope")
    if s.rope_type == "yarn" and s.position_embedding_type == "rope":
        s.derive(position_embedding_type="yarn")
    if not s.add_position_embedding and s.position_embedding_type == "learned_absolute":
        s.derive(position_embedding_type="none")
    if s.max_position_embeddings is None and s.position_embedding_type != "learned_absolute":
        s.derive(max_position_embeddings=s.seq_length)
    if s.add_bias_linear:
        s.derive(add_qkv_bias=True)
    if s.transformer_impl == "transformer_engine":
        s.note("--transformer-impl transformer_engine: Transformer Engine is not used; the layers run on plain torch")
    if s.num_moe_experts == 0:
        s.derive(num_moe_experts=None)


def _attention(s: Settings) -> None:
    groups, heads = s.num_query_groups, s.num_attention_heads
    if s.group_query_attention and groups is None:
        s.derive(num_query_groups=1)
    elif not s.group_query_attention and groups not in (None, 0, heads):
        s.note(f"{s.say('num_query_groups')} implies --group-query-attention")
        s.derive(group_query_attention=True)
    if s.apply_query_key_layer_scaling:
        s.derive(attention_softmax_in_fp32=True)


def _precision(s: Settings) -> None:
    if s.bf16 and not s.grad_reduce_in_bf16 and s.main_grads_dtype == "fp32":
        s.derive(grad_reduce_in_fp32=True)


def _experts(s: Settings) -> None:
    if s.num_moe_experts is not None and s.moe_ffn_hidden_size is None:
        s.derive(moe_ffn_hidden_size=s.ffn_hidden_size)
    if s.moe_use_upcycling:
        s.derive(no_load_optim=True, no_load_rng=True)


def _optimizer(s: Settings) -> None:
    derive_sharding(s)
    if s.no_weight_decay_cond_type == "apply_wd_to_qk_layernorm":
        s.derive(apply_wd_to_qk_layernorm=True)
    if s.optimizer == "dist_muon":
        s.note("--optimizer dist_muon is --optimizer muon with --use-distributed-optimizer")
        s.derive(optimizer="muon", use_distributed_optimizer=True)
    elif s.optimizer == "muon" and s.overlap_param_gather and not s.use_distributed_optimizer:
        s.note("--overlap-param-gather with --optimizer muon implies --use-distributed-optimizer")
        s.derive(use_distributed_optimizer=True)
    if s.weight_decay_incr_style == "constant" and s.start_weight_decay is None and s.end_weight_decay is None:
        s.derive(start_weight_decay=s.weight_decay, end_weight_decay=s.weight_decay)
    if s.recompute_activations and s.recompute_granularity is None:
        s.derive(recompute_granularity="selective")
    if s.recompute_granularity == "selective" and s.recompute_modules is None:
        s.derive(recompute_modules=["core_attn"])


def _data(s: Settings) -> None:
    for dest in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        paths = getattr(s, dest)
        if paths and len(paths) == 1 and " " in paths[0].strip() and _is_number(paths[0].split()[0]):
            s.note(f"{s.name(dest)} holds a whole blend in one text; it is divided at its spaces")
            s.derive(**{dest: paths[0].split()})
    if s.split is not None and s.split != s.split.strip("'\""):
        s.note(f"--split {s.split} is written with quotes; they are taken off")
        s.derive(split=s.split.strip("'\""))
    if s.split is None and (s.data_path or s.data_args_path):
        s.derive(split="969, 30, 1")
    if s.dataloader_type is None:
        s.derive(dataloader_type="single")
    if s.tokenizer_type is None and s.metadata_path is None:
        s.derive(tokenizer_type="GPT2BPETokenizer")
    has_data = s.mock_data or any(
        getattr(s, dest) for dest in ("data_path", "train_data_path", "data_args_path", "per_split_data_args_path")
    )
    if not has_data and s.dataloader_type != "external":
        s.note("no flag names data: pretrain_gpt.py will need --data-path, or --mock-data to try the settings out")


def _is_number(text: str) -> bool:
    try:
        decimal(text)
    except ValueError:
        return False
    return True


def _checkpoint(s: Settings) -> None:
    if s.skip_train:
        s.derive(no_load_optim=True)

# SPDX-License-Identifier: Apache-2.0
"""Rules between the model's settings and other groups': positions, scores, dtypes, update rules.

Each function yields a sentence for every violation.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.errors import ConfigError
from megatron.core.plan.heterogeneous import FLAG, parse_blocks, parse_document
from megatron.training.config.layout_relations import sharding_flag
from megatron.training.config.run_groups import RunGroups


def positions_reach_the_sequence(run: RunGroups) -> Iterator[str]:
    """Learned positions are a table; rotary ones are as long as the longest sequence."""
    positions, length = run.gpt.max_position_embeddings, run.data.seq_length
    if positions is None and run.model.position_embedding_type == "learned_absolute":
        yield (
            "--max-position-embeddings is missing; give at least the sequence length, --max-position-embeddings "
            f"{length or 1024}"
        )
    if positions is not None and length is not None and positions < length:
        yield f"{run.say('max_position_embeddings')} is less than {run.say('seq_length')}; use {length} or more"


def rotation_takes_pairs(run: RunGroups) -> Iterator[str]:
    """Rotary positions turn pairs of a head's channels."""
    model = run.model
    is_latent = model.multi_latent_attention
    if not model.rotates_heads or (model.kv_channels is None and not is_latent):
        return
    # Rounded down, as the model does it.
    rotated = int(model.rotary_width * run.gpt.rotary_percent)
    if rotated < 2 or rotated % 2:
        yield (
            f"{run.say('position_embedding_type')} rotates pairs of channels, but {run.say('rotary_percent')} of "
            f"{model.rotary_width} channels per head is {rotated}; use an even number, through "
            f"{'--qk-pos-emb-head-dim' if is_latent else '--kv-channels'} or --rotary-percent"
        )


def latent_attention_has_no_groups(run: RunGroups) -> Iterator[str]:
    """Every head of latent attention has separate keys and values."""
    if run.model.multi_latent_attention and run.gpt.group_query_attention:
        yield "--multi-latent-attention and --group-query-attention contradict each other; keep one"


def layers_of_different_shapes_are_said(run: RunGroups) -> Iterator[str]:
    """The command line says the model that the file of --heterogeneous-layers-config-path has: each difference."""
    model, gpt = run.model, run.gpt
    if model.heterogeneous_layers_config_encoded_json is None:
        return
    try:
        document = parse_document(model.heterogeneous_layers_config_encoded_json)
        heads = model.num_attention_heads or 1
        blocks = parse_blocks(model.heterogeneous_layers_config_encoded_json, model.hidden_size or 1, heads)
    except ConfigError:
        return  # the model's rules say so
    scaling = document.get("rope_scaling")
    expected = {
        "--normalization RMSNorm": model.normalization == "RMSNorm",
        "--swiglu": model.gated_linear_unit and model.activation_func == "silu",
        "--group-query-attention": gpt.group_query_attention,
        "--position-embedding-type rope": model.position_embedding_type == "rope",
        "--rotary-percent 1.0": gpt.rotary_percent == 1.0,
        "--use-rope-scaling": gpt.use_rope_scaling or not scaling,
    }
    groups = {block.query_groups for block in blocks if block.query_groups is not None}
    if len(groups) == 1:
        (each,) = groups
        expected[f"--num-query-groups {each}"] = model.num_query_groups == each
    for field, flag, value in (
        ("num_hidden_layers", "--num-layers", model.num_layers),
        ("hidden_size", "--hidden-size", model.hidden_size),
        ("num_attention_heads", "--num-attention-heads", model.num_attention_heads),
        ("rope_theta", "--rotary-base", gpt.rotary_base),
    ):
        if document.get(field) is not None:
            expected[f"{flag} {document[field]}"] = document[field] == value
    if isinstance(scaling, dict) and scaling.get("factor") is not None:
        expected[f"--rope-scaling-factor {scaling['factor']}"] = scaling["factor"] == gpt.rope_scaling_factor
    if isinstance(tied := document.get("tie_word_embeddings"), bool):
        flag = "--untie-embeddings-and-output-weights"
        expected[f"no {flag}" if tied else flag] = tied != gpt.untie_embeddings_and_output_weights
    if missing := [flag for flag, is_said in expected.items() if not is_said]:
        yield f"{FLAG} is for a model of other settings; give {', '.join(missing)}"
    if len(groups) > 1:
        yield f"{FLAG} has layers of {sorted(groups)} key-value heads; on the command line all have one number"
    if document.get("hidden_act", "silu") != "silu":
        yield f"{FLAG} has hidden_act {document['hidden_act']!r}; only 'silu' is known"


def rotary_positions_are_scaled_once(run: RunGroups) -> Iterator[str]:
    """YaRN is one way to stretch rotary positions, --use-rope-scaling and LongRoPE are others."""
    long = run.model.longrope_short_factors
    if long is not None and (
        run.gpt.use_rope_scaling or run.model.uses_yarn() or run.gpt.rotary_seq_len_interpolation_factor
    ):
        yield (
            "--longrope-short-factors scales rotary frequencies, as --use-rope-scaling, YaRN and "
            "--rotary-seq-len-interpolation-factor do; keep one"
        )
    if run.gpt.use_rope_scaling and run.model.uses_yarn():
        # With latent attention rope means YaRN.
        remedy = "add --rope-type rope, or leave it out" if run.model.multi_latent_attention else "keep one"
        yield f"--use-rope-scaling and --position-embedding-type yarn both scale rotary frequencies; {remedy}"


def further_tokens_can_be_predicted(run: RunGroups) -> Iterator[str]:
    """Multi-token prediction needs computed positions (not a table), and sequences longer than its depths."""
    depths, length = run.model.mtp_num_layers, run.data.seq_length
    yield from run.model.prediction_problems(run.model.position_embedding_type)
    if depths is not None and length is not None and depths >= length:
        yield (
            f"{run.say('mtp_num_layers')} reaches beyond the end of every sequence of {run.say('seq_length')}; "
            f"use less than {length}"
        )


def scores_can_be_measured(run: RunGroups) -> Iterator[str]:
    """Check that the largest attention scores can be measured where clipping needs them, and that clipping lasts."""
    model = run.model
    if run.logger.log_max_attention_logit and not model.qk_clip:
        yield from model.score_measuring_problems("--log-max-attention-logit")
    if (model.qk_clip or run.logger.log_max_attention_logit) and run.ddp.overlap_param_gather_with_optimizer_step:
        asked = "--qk-clip" if model.qk_clip else "--log-max-attention-logit"
        # With that flag the first chunks are gathered while others are still being updated.
        yield f"{asked} acts when all chunks are updated; leave --overlap-param-gather-with-optimizer-step out"
    if model.qk_clip and run.ddp.use_torch_fsdp2:
        yield "--qk-clip needs whole rows, which --use-torch-fsdp2 may cut; use --use-distributed-optimizer"


def optimizer_fits_the_model(run: RunGroups) -> Iterator[str]:
    """Yield what an update rule needs of the model."""
    model, optimizer = run.model, run.optimizer
    if model.use_mup and optimizer.optimizer not in ("adam", "lion"):
        yield f"--use-mup scales the learning rates of Adam and Lion, not of {run.say('optimizer')}; use adam"
    groups, tp = model.num_query_groups, model.tensor_model_parallel_size
    # Blockwise orthogonalisation works on the shard a rank holds; without splitting queries, keys and values a shard
    # must be whole query groups.
    is_cut = optimizer.muon_tp_mode == "blockwise" and not optimizer.muon_split_qkv
    if optimizer.optimizer == "muon" and is_cut and groups and groups != model.num_attention_heads and groups < tp:
        yield (
            "--muon-tp-mode blockwise with --muon-no-split-qkv needs as many query groups as "
            f"{run.say('tensor_model_parallel_size')}, not {groups}; use --muon-tp-mode duplicated"
        )


def optimizer_formats_fit_the_model(run: RunGroups) -> Iterator[str]:
    """Check the dtypes of optimizer state against the dtypes of the model and of gradients."""
    optimizer, model = run.optimizer, run.model
    if optimizer.main_grads_dtype == "bf16" and not model.bf16:
        yield f"{run.say('main_grads_dtype')} needs --bf16"
    if optimizer.main_grads_dtype == "bf16" and run.ddp.grad_reduce_in_fp32:
        yield f"{run.say('main_grads_dtype')} contradicts --accumulate-allreduce-grads-in-fp32; keep one"
    if optimizer.main_params_dtype == "fp16" and not (model.bf16 or model.fp16):
        yield f"{run.say('main_params_dtype')} needs --bf16 or --fp16: a float32 run has no main parameters"
    if model.fp16 and optimizer.loss_scale is None and optimizer.min_loss_scale > optimizer.initial_loss_scale:
        yield f"{run.say('min_loss_scale')} is above {run.say('initial_loss_scale')}; give a smaller --min-loss-scale"


def recomputation_is_said_once(run: RunGroups) -> Iterator[str]:
    """--recompute-activations is an earlier spelling."""
    if run.training.recompute_activations and run.model.recompute_granularity == "full":
        yield "--recompute-activations means --recompute-granularity selective, which contradicts full; keep one"


def vocabulary_divides_over_the_ranks(run: RunGroups) -> Iterator[str]:
    """A size of the table that was asked for; of what a tokenizer makes, recipes/vocabulary.py asks the same."""
    rows = run.tokenizer.padded_vocab_size
    problem = find_uneven_rows(run.flag("padded_vocab_size"), rows or 0, run.model.tensor_model_parallel_size)
    if problem is not None:
        yield problem


def find_uneven_rows(asked: str, rows: int, ranks: int) -> str | None:
    """Return why tensor-parallel ranks cannot share a table of so many rows; None where they can. asked: what made it
    so."""
    # The vocabulary is split by rows, and all shards have one shape.
    if rows % ranks == 0:
        return None
    return (
        f"{asked} {rows} cannot be divided among --tensor-model-parallel-size {ranks}; "
        f"use --padded-vocab-size {-(-rows // ranks) * ranks}"
    )


def find_what_no_graph_repeats(run: RunGroups) -> str | None:
    """CudaGraphFields.find_what_no_graph_repeats, of the settings of all groups."""
    if run.gpt.transformer_impl != "local":
        return f"{run.say('transformer_impl')}, whose modules keep scales and work space of their own"
    return run.model.find_what_no_graph_repeats()


def layers_can_be_recorded(run: RunGroups) -> Iterator[str]:
    """A CUDA graph repeats kernels at fixed addresses, on tensors of fixed shapes, and nothing that the host does."""
    if run.model.cuda_graph_impl == "none":
        return
    asked = run.say("cuda_graph_impl")
    if run.ddp.use_torch_fsdp2:
        yield (
            f"{asked} needs weights that stay where they are, which {sharding_flag(run)} gathers anew; use "
            "--use-distributed-optimizer"
        )
    if run.gpt.transformer_impl != "local":
        yield f"{asked} cannot record layers of {find_what_no_graph_repeats(run)}; use --cuda-graph-impl none"
    if run.logger.log_comm_volume:
        yield f"--log-comm-volume counts calls, which {asked} no longer makes; leave out one of them"
    apart = [
        name for name in ("sft", "dataloader_inter_document_masking", "reset_attention_mask") if getattr(run.data, name)
    ] + ["dpo"] * run.preference.dpo
    if apart:
        yield (
            f"{asked} needs microbatches of one shape, which documents of {run.flag(apart[0])} do not have; leave out "
            "one of them"
        )


MODEL_RELATIONS = (
    positions_reach_the_sequence, rotation_takes_pairs, latent_attention_has_no_groups,
    rotary_positions_are_scaled_once, layers_of_different_shapes_are_said,
    further_tokens_can_be_predicted, scores_can_be_measured,
    optimizer_fits_the_model, optimizer_formats_fit_the_model, recomputation_is_said_once,
    vocabulary_divides_over_the_ranks, layers_can_be_recorded,
)  # fmt: skip

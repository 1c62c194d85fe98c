# SPDX-License-Identifier: Apache-2.0
"""A cluster's command line made small enough for a laptop: the same kinds of layers, layout and options, tiny sizes.

    command, processes = shrink(["--preset", "llama3-70b", "--tensor-model-parallel-size", "8", ...])

What keeps its value is what a run is made of: activation, norms, positions, optimizer, precision, overlaps, schedules.
What becomes small are sizes, degrees of parallelism, lengths. Data and tokenizer are replaced by made-up ones, and what
would be read or written (checkpoints, logs) is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.errors import ConfigError
from megatron.core.plan.letters import split_letters
from megatron.core.transformer.config_fields.precision import MULTIPLES
from megatron.training.config.container import RunConfig
from megatron.training.config.run_groups import groups_of_fields
from megatron.training.flags.declarations import declared_flags
from megatron.training.flags.read import examine

_MOST_PROCESSES = 4
_HEADS = 4
_LENGTH = 64
# What is read, written and profiled; the small tokenizer is given below.
_GROUPS_LEFT_OUT = ("checkpoint", "distillation", "preference", "profiling", "tokenizer")
# The same among settings of other groups, and what belongs to numbers of layers, samples or ranks that change.
_LEFT_OUT = frozenset(
    """
    data_path train_data_path valid_data_path test_data_path data_args_path per_split_data_args_path split
    data_cache_path per_dataset_sequences_path object_storage_cache_path dataloader_fast_cache_load
    dataloader_defer_npy_index_mmap fim_data sft skip_bad_conversations create_attention_mask_in_dataloader
    tensorboard_dir wandb_project wandb_exp_name wandb_entity wandb_save_dir metrics_dir log_progress
    alert_command alert_webhook alert_stall_seconds flight_recorder_dump_path
    exit_interval phase_transition_iterations exit_duration_in_mins iterations_to_skip
    start_eval_at_iter eval_interval eval_sample_prompt eval_sample_tokens eval_tasks eval_tasks_path eval_tasks_limit
    full_validation multiple_validation_sets validation_set_names skip_train
    rampup_batch_size step_batch_size_schedule train_samples lr_decay_samples lr_warmup_samples lr_wsd_decay_samples
    lr_decay_iters lr_warmup_fraction eval_global_batch_size eval_micro_batch_size
    pipeline_model_parallel_layout decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers
    account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
    num_layers_per_virtual_pipeline_stage microbatch_group_size_per_vp_stage
    hierarchical_context_parallel_sizes num_buckets use_tp_pp_dp_mapping
    """.split()
)


def shrink(
    argv: Sequence[str], environ: Mapping[str, str] | None = None, most_processes: int = _MOST_PROCESSES
) -> tuple[list[str], int]:
    """Make the flags of the small run, and say how many processes it has.

    environ: of it WORLD_SIZE counts. most_processes: 1 or more. Raises ConfigError where the small run's flags have
    problems: the same that the large one's have.
    """
    examination = examine(argv, environ or {})
    spelling = [problem for problem in examination.problems if problem.kind in ("spelling", "not supported", "planned")]
    if spelling:
        raise ConfigError([problem.text for problem in spelling])
    config = examination.config
    values = {flag.dest: config.read(flag.dest) for flag in declared_flags()}
    given = {flag.dest for flag in declared_flags() if config.sources[flag.name] != "default"}
    sizes = _shrink_layout(config, values, most_processes)
    processes = sizes.pop("processes")
    sizes |= _shrink_model(values, given, sizes)
    sizes |= _fit_few_bits(config, values, sizes)
    sizes |= _shrink_run(values, given, sizes, processes)
    words: list[str] = []
    for flag in declared_flags():
        value = sizes.get(flag.dest, values[flag.dest])
        is_left_out = groups_of_fields()[flag.dest] in _GROUPS_LEFT_OUT or flag.dest in _LEFT_OUT
        if flag.dest not in sizes and (flag.dest not in given or is_left_out):
            continue
        if value is not None and value != flag.default:
            words += flag.spell(value).split()
    small = examine(words, {"WORLD_SIZE": str(processes)})
    if small.problems:
        raise ConfigError([problem.text for problem in small.problems])
    return words, processes


def _shrink_layout(config: RunConfig, values: Mapping[str, Any], most_processes: int) -> dict[str, Any]:
    """Two ranks on each axis that has several, as long as there are processes; the later axes give way first."""
    left = most_processes
    sizes: dict[str, Any] = {}
    for axis in ("tensor_model", "pipeline_model", "context"):
        name = f"{axis}_parallel_size"
        sizes[name] = 2 if values[name] > 1 and left >= 2 else 1
        left //= sizes[name]
    # Experts live on the ranks of the same model-parallel grid and on its replicas.
    replicas = 2 if config.data_parallel_size > 1 and left >= 2 else 1
    wide = sizes["tensor_model_parallel_size"] * sizes["context_parallel_size"] * replicas
    if values["expert_model_parallel_size"] > 1 and wide == 1 and left >= 2:
        replicas = wide = 2
    sizes["expert_model_parallel_size"] = 2 if values["expert_model_parallel_size"] > 1 and wide > 1 else 1
    room = wide // sizes["expert_model_parallel_size"]
    sizes["expert_tensor_parallel_size"] = min(
        values["expert_tensor_parallel_size"] or sizes["tensor_model_parallel_size"], room
    )
    if values["num_moe_experts"] is None:
        del sizes["expert_tensor_parallel_size"]
    if "a2a+p2p" in (values["cp_comm_type"] or []):
        sizes["cp_comm_type"] = ["p2p"]
    if values["num_distributed_optimizer_instances"] > 1:
        sizes["num_distributed_optimizer_instances"] = replicas
    chunks = 2 if _is_interleaved(values) and sizes["pipeline_model_parallel_size"] > 1 else None
    sizes["num_virtual_stages_per_pipeline_rank"] = chunks
    sizes["sequence_parallel"] = values["sequence_parallel"] and sizes["tensor_model_parallel_size"] > 1
    ranks = sizes["tensor_model_parallel_size"] * sizes["context_parallel_size"]
    return sizes | {"processes": ranks * sizes["pipeline_model_parallel_size"] * replicas}


def _is_interleaved(values: Mapping[str, Any]) -> bool:
    return bool(values["num_layers_per_virtual_pipeline_stage"] or values["num_virtual_stages_per_pipeline_rank"])


def _shrink_model(values: Mapping[str, Any], given: set[str], layout: Mapping[str, Any]) -> dict[str, Any]:
    chunks = layout["pipeline_model_parallel_size"] * (layout["num_virtual_stages_per_pipeline_rank"] or 1)
    if values["pipeline_schedule"] == "zb-v":
        chunks *= 2
    layers = max(2, chunks)
    # Every n-th layer without positions: n must divide the layers.
    if isinstance(values["no_rope_freq"], int):
        layers = max(layers, 4)
    if values["linear_attention_freq"] is not None:
        layers = max(layers, 2 * chunks)
    if values["dsa_indexer_topk_freq"] > 1:  # each stage has a layer that chooses, and one that takes its choice
        layers = max(layers, 2 * chunks)
    letters = _shrink_letters(values["hybrid_layer_pattern"], chunks)
    sizes: dict[str, Any] = letters | {
        "num_layers": layers, "hidden_size": 16 * _HEADS, "num_attention_heads": _HEADS, "seq_length": _LENGTH,
        "max_position_embeddings": _LENGTH, "tokenizer_type": "NullTokenizer", "vocab_size": 1000,
        "make_vocab_size_divisible_by": 8,
    }  # fmt: skip
    if letters:
        del sizes["num_layers"]
    shared = 2 if values["linear_num_value_heads"] > values["linear_num_key_heads"] else 1
    # Whether given or not: defaults are for large models.
    if "M" in (values["hybrid_layer_pattern"] or ""):
        sizes |= {"mamba_num_heads": 8, "mamba_head_dim": 16, "mamba_num_groups": 2, "mamba_state_dim": 16}
    if values["linear_attention_freq"] is not None or {"G", "K"} & set(values["hybrid_layer_pattern"] or ""):
        sizes |= {"linear_num_key_heads": 4, "linear_num_value_heads": 4 * shared, "linear_key_head_dim": 16,
                  "linear_value_head_dim": 16}  # fmt: skip
    small = {
        "ffn_hidden_size": 128, "kv_channels": 16, "window_size": (15, 0), "attention_chunk_size": 16,
        "dsa_indexer_n_heads": 4, "dsa_indexer_head_dim": 16, "dsa_indexer_topk": 8,
        "attn_temperature_floor": 8, "mup_base_hidden_size": 32,
        "q_lora_rank": 24, "kv_lora_rank": 16, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 16,
    }  # fmt: skip
    sizes |= {name: value for name, value in small.items() if name in given and values[name] is not None}
    if values["dsa_indexer_topk_freq"] > 1:
        sizes |= {"dsa_indexer_topk_freq": 2, "dsa_indexer_skip_topk_offset": 0}
    if values["num_query_groups"] and values["num_query_groups"] < values["num_attention_heads"]:
        groups = 1 if values["num_query_groups"] == 1 else 2
        sizes |= {"num_query_groups": groups, "group_query_attention": True}
    else:
        sizes["num_query_groups"] = None
    for name in ("no_rope_freq", "window_attn_skip_freq", "moe_layer_freq", "linear_attention_freq"):
        if isinstance(values[name], int):
            sizes[name] = 2 if values[name] > 1 else values[name]
        elif values[name] is not None:
            # Both kinds of layers stay, if there are both.
            pattern = list(values[name])
            sizes[name] = [*pattern[: layers // 2], *pattern[len(pattern) - (layers - layers // 2) :]]
    if values["num_moe_experts"] is not None:
        sizes |= _shrink_experts(values, given)
    return sizes


def _shrink_letters(pattern: str | None, chunks: int) -> dict[str, Any]:
    """A pattern with a layer of each letter on every chunk, and the same depths of prediction; nothing for a GPT."""
    if pattern is None:
        return {}
    letters = split_letters(pattern)
    each = "".join(dict.fromkeys(letters.decoder))
    cut = "|" if len(letters.segments) > 1 else ""
    depths = "".join(f"/{part}" for part in letters.predictions)
    return {"hybrid_layer_pattern": cut.join([each] * chunks) + depths}


def _fit_few_bits(config: RunConfig, values: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Widths of the small model that are whole blocks of its recipe for 8 or 4 bits, on each of its ranks."""
    recipe = config.model.few_bits_recipe
    if recipe not in MULTIPLES:
        return {}
    block = MULTIPLES[recipe] * sizes["tensor_model_parallel_size"]
    # What follows from the width of the model else, by rules that know no blocks.
    widths = {"ffn_hidden_size": 128}
    if not values["multi_latent_attention"]:
        widths["kv_channels"] = 16
    # A latent vector and its positions are columns of one layer, so each of them is rounded up.
    rest = (
        "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim",
        "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size",
    )  # fmt: skip
    widths |= {name: sizes[name] for name in ("hidden_size", *rest) if name in sizes}
    return {name: -(-width // block) * block for name, width in widths.items()}


def _shrink_experts(values: Mapping[str, Any], given: set[str]) -> dict[str, Any]:
    experts = min(values["num_moe_experts"], 8)
    sizes: dict[str, Any] = {"num_moe_experts": experts, "moe_router_topk": min(values["moe_router_topk"], 2)}
    small = {"moe_ffn_hidden_size": 32, "moe_shared_expert_intermediate_size": 32}
    sizes |= {name: value for name, value in small.items() if values[name] is not None and name in given}
    if values["moe_router_num_groups"]:
        sizes |= {"moe_router_num_groups": 2, "moe_router_group_topk": 1}
    return sizes


def _shrink_run(
    values: Mapping[str, Any], given: set[str], layout: Mapping[str, Any], processes: int
) -> dict[str, Any]:
    stages = layout["pipeline_model_parallel_size"]
    ranks = layout["tensor_model_parallel_size"] * layout["context_parallel_size"] * stages
    sizes: dict[str, Any] = {
        "micro_batch_size": 1, "global_batch_size": processes // ranks * 2 * stages, "train_iters": 5,
        "mock_data": True, "log_interval": 1, "eval_iters": 0, "num_workers": 0,
    }  # fmt: skip
    # A scale that has to be halved first would take all of these steps.
    if values["fp16"] and values["loss_scale"] is None:
        sizes["initial_loss_scale"] = min(values["initial_loss_scale"], 2.0**12)
    small = {"lr_warmup_iters": 1, "lr_wsd_decay_iters": 2, "recompute_num_layers": 1, "num_dataset_builder_threads": 1}
    return sizes | {name: value for name, value in small.items() if name in given and values[name]}

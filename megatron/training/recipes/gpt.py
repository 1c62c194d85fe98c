# SPDX-License-Identifier: Apache-2.0
"""The recipe of GPT models: from the settings of a run to its model, its data, its forward step and its loss.

torch is imported only where it is used, so that a program answers `--help` and mistakes at once.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from megatron.core.errors import ConfigError
from megatron.planner.memory import Workload
from megatron.training.config.container import RunConfig
from megatron.training.recipes.forward_step import forward_step
from megatron.training.recipes.gpt_data import build_gpt_datasets
from megatron.training.recipes.recipe import Recipe
from megatron.training.recipes.vocabulary import build_tokenizer, compute_padded_vocab_size, compute_vocab_size

if TYPE_CHECKING:
    import torch
    from torch import nn

    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tokenizers.base import Tokenizer
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig


def build_gpt_recipe(config: RunConfig, tokenizer: Tokenizer | None = None) -> Recipe:
    """Return what the trainer needs to train the GPT model that the settings describe.

    tokenizer: built from the settings when None. Raises ConfigError or DataError for a vocabulary that cannot be used.
    """
    tokenizer = tokenizer or build_tokenizer(config)
    vocab_size, padded_vocab_size = compute_vocab_size(config, tokenizer), compute_padded_vocab_size(config, tokenizer)
    if config.model.moe_n_hash_layers and (config.model.actual_vocab_size or 0) < vocab_size:
        raise ConfigError(
            f"--actual-vocab-size {config.model.actual_vocab_size} has no experts for the last of {vocab_size} tokens; "
            f"give {vocab_size}"
        )
    # Rotary positions are computed, so they end nowhere; learned ones are a table with an end.
    learns_positions = config.model.position_embedding_type == "learned_absolute"
    return Recipe(
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        padded_vocab_size=padded_vocab_size,
        build_model=functools.partial(build_gpt_model, config, padded_vocab_size),
        build_datasets=functools.partial(build_gpt_datasets, config, tokenizer),
        forward_step=build_forward_step(config),
        max_sequence_length=config.gpt.max_position_embeddings if learns_positions else None,
        count_flops_per_token=functools.partial(count_gpt_flops_per_token, config, padded_vocab_size),
        workload=describe_gpt_workload(config, padded_vocab_size),
        describe_operations=functools.partial(describe_gpt_operations, config, padded_vocab_size),
    )


# ---- the forward step


def build_forward_step(config: RunConfig) -> Callable[..., Any]:
    """The forward step of the run: a language model's, a student's with a teacher's logits, or one on pairs."""
    if config.distillation.logits_load_dir is not None:
        from megatron.training.recipes.distillation import StudentStep

        return StudentStep(config.distillation.logits_load_kd_loss_alpha)
    if not config.preference.dpo:
        return forward_step
    from megatron.training.recipes.preference import PreferenceStep

    step = PreferenceStep(config.preference)
    # It has pairs without numbers, and runs no pass over them.
    if config.profiling.dry_run:
        step.set_references({0: (0.0, 0.0)})
    return step


# ---- the model


def build_gpt_model(
    config: RunConfig,
    padded_vocab_size: int,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> GPTModel:
    """One pipeline chunk of the model, on torch's default device, with its initial weights.

    pre_process, post_process: the chunk holds the embedding, the output layer.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    assert config.gpt.max_position_embeddings is not None, "checked by read_run_config"
    spec = read_layer_spec(config.gpt.spec, config.model, config.gpt.transformer_impl)
    if config.model.hybrid_layer_pattern is None:
        build: Callable[..., GPTModel] = functools.partial(
            GPTModel, transformer_layer_spec=spec, mtp_block_spec=get_gpt_mtp_block_spec(config.model, spec)
        )
    else:
        from megatron.core.models.hybrid.hybrid_model import HybridModel

        build = functools.partial(HybridModel, hybrid_stack_spec=spec)
    return build(
        config=config.model,
        vocab_size=padded_vocab_size,
        max_sequence_length=config.gpt.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not config.gpt.untie_embeddings_and_output_weights,
        position_embedding_type=cast(Any, config.model.position_embedding_type),
        rotary_percent=config.gpt.rotary_percent,
        rotary_base=config.gpt.rotary_base,
        rope_scaling=config.gpt.use_rope_scaling,
        rope_scaling_factor=config.gpt.rope_scaling_factor,
        seq_len_interpolation_factor=config.gpt.rotary_seq_len_interpolation_factor,
        pg_collection=pg_collection,
        vp_stage=vp_stage,
    )


def count_gpt_flops_per_token(config: RunConfig, padded_vocab_size: int, chunks: Sequence[nn.Module]) -> float | None:
    """Floating-point operations for one token, forward and backward; None where the chunks are no GPT models."""
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.planner.throughput import count_training_flops_per_token

    # A user's model may do anything; a wrong count would show as a wrong MFU.
    if not all(isinstance(chunk, GPTModel) for chunk in chunks):
        return None
    assert config.data.seq_length is not None, "checked by read_run_config"
    return count_training_flops_per_token(
        config.model, seq_length=config.data.seq_length, padded_vocab_size=padded_vocab_size
    )


def describe_gpt_workload(config: RunConfig, padded_vocab_size: int, num_microbatches: int | None = None) -> Workload:
    """Return what a process works on, for the planner's formulas.

    num_microbatches: of a step; None: at the end of the run, where a growing batch fills the pipeline most.
    """
    batch, replicas = config.training, config.data_parallel_size
    micro_batch_size = batch.micro_batch_size or 1
    if num_microbatches is None:
        num_microbatches = max(1, (batch.global_batch_size or 1) // (micro_batch_size * replicas))
    return Workload(
        padded_vocab_size=padded_vocab_size,
        has_output_layer=config.gpt.untie_embeddings_and_output_weights,
        seq_length=config.data.seq_length or 1,
        micro_batch_size=micro_batch_size,
        num_microbatches=num_microbatches,
        data_parallel_size=config.site_replicas,
        offloaded_state=config.optimizer.optimizer_offload_fraction if config.optimizer.optimizer_cpu_offload else 0.0,
        outer_bytes=config.sites.outer_bytes,
    )


def describe_gpt_operations(
    config: RunConfig,
    padded_vocab_size: int,
    chunks: Sequence[nn.Module],
    groups: ProcessGroupCollection,
    device: torch.device,
) -> Mapping[str, str]:
    """Return which implementation each operation got; nothing for a user's model or layer."""
    from megatron.core.models.gpt.gpt_layer_specs import STATE_MIXERS
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.plan.read import read_plan
    from megatron.core.ssm.describe import describe_mixers
    from megatron.core.tensor_parallel.products import CommunicationPlan
    from megatron.core.transformer.core_attention.dot_product_attention import DotProductAttention
    from megatron.core.transformer.execution.operations import describe_operations
    from megatron.core.transformer.execution.transformer_engine_package import choose_implementation
    from megatron.planner.throughput import count_training_flops_per_token

    if config.gpt.spec not in (None, ["local"]) or any(type(chunk) not in (GPTModel, HybridModel) for chunk in chunks):
        return {}
    asked = "local" if config.gpt.spec else config.gpt.transformer_impl
    chosen = choose_implementation(asked, device)
    engine = None
    if chosen.is_engine:
        engine = ", ".join(filter(None, (chosen.name, config.model.few_bits_recipe)))
    described = describe_operations(config.model, device, engine)
    if asked != "local":
        described["transformer layers"] = chosen.name
    if chosen.is_engine:
        described |= _describe_engine(chunks)
    plans = (getattr(part, "plan", None) for chunk in chunks for part in chunk.modules())
    names = dict.fromkeys(plan.name for plan in plans if isinstance(plan, CommunicationPlan) and plan.name)
    if names:
        described["tensor parallelism"] = "; ".join(names)
    if groups.cp.size() > 1:
        parts = (part for chunk in chunks for part in chunk.modules() if isinstance(part, DotProductAttention))
        described["attention"] = "; ".join(dict.fromkeys(part.backend.name for part in parts))
    length = config.data.seq_length or 1
    decoder = read_plan(config.model).decoder
    kinds = {"mamba" if kind == "parallel" else kind for layer in decoder for kind in layer.kinds}
    mixers = [mixer for kind, mixer in STATE_MIXERS.items() if kind in kinds]
    if mixers:
        described |= describe_mixers(config.model, mixers, groups, length, config.training.micro_batch_size or 1)
    ours, theirs = (
        count_training_flops_per_token(
            config.model, seq_length=length, padded_vocab_size=padded_vocab_size, sees_all=sees_all
        )
        for sees_all in (False, True)
    )
    if ours != theirs:
        described["work"] = (
            f"{ours / 1e6:,.1f} million floating-point operations per token; Megatron-LM, which does not know windows "
            f"and chunks, counts {theirs / 1e6:,.1f}"
        )
    return described


def _describe_engine(chunks: Sequence[nn.Module]) -> dict[str, str]:
    """Return what Transformer Engine computes in addition to products."""
    from megatron.core.transformer.core_attention.dot_product_attention import DotProductAttention
    from megatron.core.transformer.transformer_layer import TransformerLayer

    parts = [part for chunk in chunks for part in chunk.modules()]
    described = {}
    if any(isinstance(part, TransformerLayer) and part.execution.fuses_norms for part in parts):
        described["norm"] = "Transformer Engine, with the products behind it"
    backends = dict.fromkeys(part.backend.name for part in parts if isinstance(part, DotProductAttention))
    return described | ({"attention": "; ".join(backends)} if backends else {})


# ---- a user's layers (--spec)


def read_layer_spec(
    words: Sequence[str] | None, config: TransformerConfig, implementation: str = "local"
) -> ModuleSpec:
    """The ModuleSpec of one transformer layer, or of a hybrid's stack of layers.

    words: of --spec: a module and the name of a function in it, without parameters or with one for the config, or of a
    ModuleSpec; None or `local`: our layer. implementation: of --transformer-impl. Raises ConfigError where the
    words lead nowhere, or their module or function fails, and as `choose_implementation` does.
    """
    from megatron.core.device import current_device
    from megatron.core.models.gpt.gpt_layer_specs import by_transformer_engine, get_gpt_layer_spec
    from megatron.core.models.hybrid import hybrid_layer_specs
    from megatron.core.transformer.execution.transformer_engine_package import choose_implementation
    from megatron.core.transformer.spec_utils import ModuleSpec

    is_hybrid, stack = config.hybrid_layer_pattern is not None, hybrid_layer_specs.hybrid_stack_spec
    found = None if words is None or list(words) == ["local"] else _import_named(*words)
    # Upstream's scripts name what is the usual stack here.
    if found is None or (is_hybrid and found is stack):
        chosen = choose_implementation("local" if words and found is None else implementation, current_device())
        if is_hybrid:
            stack = hybrid_layer_specs.get_hybrid_stack_spec()
            return hybrid_layer_specs.by_transformer_engine_in_stack(stack) if chosen.is_engine else stack
        spec = get_gpt_layer_spec(multi_latent_attention=config.multi_latent_attention)
        return by_transformer_engine(spec) if chosen.is_engine else spec
    assert words is not None
    # A builtin, such as os.system, makes no layer, and is not to be called with what it was not made for.
    if callable(found) and not isinstance(found, ModuleSpec) and not inspect.isbuiltin(found):
        try:
            found = found(config) if inspect.signature(found).parameters else found()
        except ConfigError:
            raise
        except Exception as error:
            raise _spec_error(words, error) from error
    if not isinstance(found, ModuleSpec):
        raise ConfigError(f"--spec {' '.join(words)} gives a {type(found).__name__}; it must give a ModuleSpec")
    is_stack = isinstance(found.submodules, hybrid_layer_specs.HybridStackSubmodules)
    if is_stack and not is_hybrid:
        raise ConfigError(f"--spec {' '.join(words)} is of a stack of letters; add --hybrid-layer-pattern")
    return found if is_stack or not is_hybrid else hybrid_layer_specs.get_stack_of(found)


def _import_named(module_name: str, name: str) -> Any:
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # "a.b" fails with the name "a" where the package is missing, with another name where one of its imports is.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise _spec_error((module_name, name), error) from error
        raise ConfigError(
            f"--spec {module_name} {name}: there is no module {error.name}; "
            "add its directory to the environment variable PYTHONPATH"
        ) from None
    except Exception as error:
        raise _spec_error((module_name, name), error) from error
    if not hasattr(module, name):
        place = getattr(module, "__file__", None) or module_name
        raise ConfigError(f"--spec {module_name} {name}: {place} has no {name}")
    return getattr(module, name)


def _spec_error(words: Sequence[str], error: Exception) -> ConfigError:
    """Return the error for a failure in a user's module or function."""
    return ConfigError(
        f"--spec {' '.join(words)} fails with {type(error).__name__}: {error}; --traceback shows where in your code"
    )

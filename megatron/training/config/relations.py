# SPDX-License-Identifier: Apache-2.0
"""Rules between settings of different groups: batches, schedules, checkpoints, profiles.

Each function yields a sentence for every violation: the flags with their values, the rule, and the nearest legal
values. Rules on how processes divide the work are in layout_relations.py, on the model in model_relations.py; rules
within one group are in its `rules`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron.core.config_base import name_divisors, name_multiples
from megatron.core.datasets.blend import read_shares
from megatron.core.errors import ConfigError
from megatron.core.num_microbatches_calculator import build_num_microbatches_calculator, parse_step_schedule
from megatron.core.optimizer_param_scheduler import SchedulerSteps, compute_scheduler_steps
from megatron.training.config.checkpoint import FOR_UPSTREAM, UPSTREAM_TORCH_DIST
from megatron.training.config.layout_relations import find_interleaving_problem
from megatron.training.config.run_groups import RunGroups


def derive_across_groups(run: RunGroups) -> None:
    """Fill in the settings that follow from another group's. What a user gave stays."""
    training, evaluation, model, scheduler = run.training, run.validation, run.model, run.scheduler
    if training.micro_batch_size is None:
        training.micro_batch_size = 1
    # The order matters: evaluation takes over what training was given or derived.
    if training.global_batch_size is None and training.step_batch_size_schedule is not None:
        training.global_batch_size = last_batch_size(training.step_batch_size_schedule)
    elif training.global_batch_size is None and run.is_divisible:
        training.global_batch_size = training.micro_batch_size * run.data_parallel_size
    if evaluation.eval_micro_batch_size is None:
        evaluation.eval_micro_batch_size = training.micro_batch_size
    if evaluation.eval_global_batch_size is None:
        evaluation.eval_global_batch_size = training.global_batch_size
    is_constant = scheduler.weight_decay_incr_style == "constant"
    if is_constant and scheduler.start_weight_decay is None and scheduler.end_weight_decay is None:
        scheduler.start_weight_decay = scheduler.end_weight_decay = run.optimizer.weight_decay
    # Learned positions are weights, so their number must be said; rotary ones are computed.
    if run.gpt.max_position_embeddings is None and model.position_embedding_type != "learned_absolute":
        run.gpt.max_position_embeddings = run.data.seq_length
    # bfloat16 has 8 bits of precision: sums over many microbatches would lose small gradients.
    if model.bf16 and not run.ddp.grad_reduce_in_bf16 and run.optimizer.main_grads_dtype == "fp32":
        run.ddp.grad_reduce_in_fp32 = True
    # Evaluation needs no moments, which may be most of a checkpoint.
    if evaluation.skip_train:
        run.checkpoint.no_load_optim = True
    # Upstream's scripts look for a converted checkpoint in a directory of the format's name.
    if run.checkpoint.ckpt_convert_format is not None and run.checkpoint.ckpt_convert_save is not None:
        run.checkpoint.save = f"{run.checkpoint.ckpt_convert_save}/{run.checkpoint.ckpt_convert_format}"
        run.checkpoint.ckpt_format = run.checkpoint.ckpt_convert_format
    model.measures_attention_logits = model.qk_clip or run.logger.log_max_attention_logit
    model.transformer_impl = run.gpt.transformer_impl
    # The optimizer is given parameters, not the model's settings.
    run.optimizer.bf16, run.optimizer.fp16 = model.bf16, model.fp16
    run.optimizer.width_multiplier = model.width_multiplier
    run.optimizer.clips_prediction_apart = model.mtp_detach_heads and model.mtp_num_layers is not None


def bad_numbers_can_be_left(run: RunGroups) -> Iterator[str]:
    """--nan-policy rollback goes back to checkpoints that this run saved."""
    save, load = run.checkpoint.save, run.checkpoint.load
    if run.reliability.nan_policy == "rollback" and (save is None or load is None or Path(save) != Path(load)):
        yield (
            f"--nan-policy rollback goes back to a checkpoint of --save, found {save or 'none'}, by --load, found "
            f"{load or 'none'}; give both the same directory, or use --nan-policy skip"
        )
    if run.data.dataloader_type == "external" and (
        run.reliability.nan_policy != "stop" or run.reliability.rerun_mode != "disabled"
    ):
        yield (
            "--dataloader-type external gives each batch once, and --nan-policy and --rerun-mode compute a step again; "
            "leave those out, or use --dataloader-type single"
        )


def restarts_go_on_from_what_is_saved(run: RunGroups) -> Iterator[str]:
    """--inprocess-restart begins again from the checkpoints in --save."""
    save, load = run.checkpoint.save, run.checkpoint.load
    if run.in_process.inprocess_restart and save is not None and (load is None or Path(save) != Path(load)):
        yield (
            f"--inprocess-restart begins again from the newest checkpoint of --save {save} by --load, found "
            f"{load or 'none'}; give both the same directory"
        )


def run_is_described(run: RunGroups) -> Iterator[str]:
    """Check for what every training run must say, and nothing can be guessed for."""
    if run.data.seq_length is None:
        yield "--seq-length is missing; give the tokens per sequence, for example --seq-length 1024"
    if run.optimizer.lr is None:
        yield "--lr is missing; give the learning rate, for example --lr 3e-4"
    if run.training.train_iters is None and run.training.train_samples is None and not run.validation.skip_train:
        yield "--train-iters is missing; say how long to train with --train-iters or --train-samples"


def training_has_documents(run: RunGroups) -> Iterator[str]:
    """A share of the documents is there for training, where a run trains."""
    if run.data.split is None or run.validation.skip_train or run.checkpoint.ckpt_convert_format is not None:
        return
    try:
        train, *_ = read_shares(run.data.split)
    except ConfigError:
        return  # the data's rules say what is wrong with the text
    if train == 0:
        yield (
            f"{run.say('split')} leaves no documents for training; make the first number larger than 0, as in 99,1,0, "
            "or evaluate only, with --skip-train"
        )


def logits_can_be_kept(run: RunGroups) -> Iterator[str]:
    """--logits-save-dir and --logits-load-dir read the training data by number, and need whole logits."""
    distillation = run.distillation
    asked = next((name for name in ("logits_save_dir", "logits_load_dir") if getattr(distillation, name)), None)
    if asked is None:
        return
    for group, name, reason in (
        (run.preference, "dpo", "learns from pairs of answers"),
        (run.model, "mtp_num_layers", "has losses of further tokens"),
        (run.model, "loss_chunk_size", "never has the logits of a whole sequence"),
        (run.model, "hybrid_context_parallel", "shares every batch among other ranks"),
        (run.training, "phase_transition_iterations", "changes the data on the way"),
    ):
        if getattr(group, name):
            yield f"{run.flag(asked)} needs the logits of each sample, {run.say(name)} {reason}; leave out one of them"
    if run.data.dataloader_type == "external":
        yield f"{run.flag(asked)} reads samples by number, {run.say('dataloader_type')} has none; leave out one of them"
    if distillation.logits_save_dir is not None and run.checkpoint.save is not None:
        yield f"--logits-save-dir trains nothing that {run.say('save')} could keep; leave that out"


def pairs_can_be_compared(run: RunGroups) -> Iterator[str]:
    """--dpo reads pairs of answers, and knows their log-probabilities only."""
    if not run.preference.dpo:
        return
    data = run.data
    others = ("mock_data", "fim_data", "reset_position_ids", "reset_attention_mask", "eod_mask_loss")
    for name in (*others, "dataloader_inter_document_masking"):
        if getattr(data, name):
            yield f"{run.say(name)} is for documents, --dpo reads pairs of answers from JSONL files; leave it out"
    if data.dataloader_type == "external":
        yield f"--dpo reads pairs of answers itself; leave out {run.say('dataloader_type')}"
    if run.model.mtp_num_layers is not None:
        yield (
            f"--dpo has no loss of further tokens, which {run.say('mtp_num_layers')} predicts; leave it out: the "
            "layers stay in the checkpoint that the run begins with"
        )
    if run.model.hybrid_context_parallel:
        yield "--dpo keeps the conversations of a pair together, which --hybrid-context-parallel does not; leave it out"
    checkpoint = run.checkpoint
    if run.preference.dpo_reference is not None and not (
        checkpoint.pretrained_checkpoint or (checkpoint.load and checkpoint.finetune)
    ):
        yield (
            "--dpo-reference names the model that a trained one is compared with; say what is trained with "
            "--pretrained-checkpoint"
        )


def batch_is_divisible(run: RunGroups) -> Iterator[str]:
    """Every optimizer step takes whole microbatches on every data-parallel rank."""
    training, replicas = run.training, run.data_parallel_size
    is_constant = training.step_batch_size_schedule is None and training.rampup_batch_size is None
    if training.global_batch_size is None or not is_constant or training.decrease_batch_size_if_needed:
        return
    # Samples of one microbatch on every data-parallel rank.
    unit = (training.micro_batch_size or 1) * replicas
    if run.is_divisible and training.global_batch_size % unit:
        yield (
            f"{run.say('global_batch_size')} is not divisible by {run.say('micro_batch_size')} x data-parallel size "
            f"{replicas} = {unit}; use {name_multiples(training.global_batch_size, unit)}"
        )


def evaluation_batch_is_divisible(run: RunGroups) -> Iterator[str]:
    """Check that evaluation's batches, where they differ, divide as training batches do."""
    evaluation, training = run.validation, run.training
    batch, micro_batch = evaluation.eval_global_batch_size, evaluation.eval_micro_batch_size
    is_trainings = (batch, micro_batch) == (training.global_batch_size, training.micro_batch_size)
    if batch is None or is_trainings or not run.is_divisible:
        return
    unit = (micro_batch or training.micro_batch_size or 1) * run.data_parallel_size
    if batch % unit:
        yield (
            f"{run.say('eval_global_batch_size')} is not divisible by {run.say('eval_micro_batch_size')} x "
            f"data-parallel size {run.data_parallel_size} = {unit}; use {name_multiples(batch, unit)}"
        )


def growing_batch_is_possible(run: RunGroups) -> Iterator[str]:
    """--rampup-batch-size and --step-batch-size-schedule, by the rules of the calculator that will use them."""
    training = run.training
    schedule, batch = training.step_batch_size_schedule, training.global_batch_size
    if schedule is None and training.rampup_batch_size is None:
        return
    if schedule is not None and batch not in (None, last_batch_size(schedule)):
        yield "--step-batch-size-schedule and --global-batch-size both set the global batch size; keep one"
        return
    try:
        sizes = build_num_microbatches_calculator(
            global_batch_size=batch if schedule is None else None,
            micro_batch_size=training.micro_batch_size or 1,
            data_parallel_size=run.data_parallel_size,
            rampup_batch_size=training.rampup_batch_size,
            step_batch_size_schedule=schedule,
            seq_length=run.data.seq_length,
            decrease_batch_size_if_needed=training.decrease_batch_size_if_needed,
        )
        # Where a checkpoint is continued, only that says which sizes are still to come; `setup` asks then.
        if run.checkpoint.load is None:
            iterations = training.train_iters
            if iterations is None and training.train_samples is not None:
                iterations = sizes.count_iterations(training.train_samples)
            sizes.check_sizes(0, iterations)
            grown = sorted({stretch.global_batch_size for stretch in sizes.stretches(0, iterations)} - {batch})
            yield from _say_once_of_all_sizes(run, grown, sizes.samples_per_microbatch)
    except ConfigError as error:
        # Where the layout does not fit, that sentence is enough: these numbers would follow from it.
        if run.is_divisible:
            yield from error.problems


def phases_have_one_batch_size(run: RunGroups) -> Iterator[str]:
    """Phases of the data are counted in iterations of equal size, each sample by itself."""
    training = run.training
    if training.phase_transition_iterations is None:
        return
    others = [name for name in ("rampup_batch_size", "step_batch_size_schedule") if getattr(training, name) is not None]
    if run.model.hybrid_context_parallel:
        others.append("hybrid_context_parallel")
    for name in others:
        yield f"--phase-transition-iterations counts batches of one size, and {run.say(name)} has others; leave it out"


def _say_once_of_all_sizes(run: RunGroups, sizes: list[int], samples_per_microbatch: int) -> Iterator[str]:
    """One sentence for all sizes of a growing batch that the interleaved schedule cannot run."""
    problems = {size: find_interleaving_problem(run, size // samples_per_microbatch) for size in sizes}
    refused = {size: problem for size, problem in problems.items() if problem is not None}
    if not refused:
        return
    first = min(refused)
    others = f", as do {len(refused) - 1} more of its sizes, up to {max(refused)}" if len(refused) > 1 else ""
    grows_by = "rampup_batch_size" if run.training.rampup_batch_size is not None else "step_batch_size_schedule"
    yield f"{run.say(grows_by)} has global batch size {first}: {refused[first]}{others}"


def last_batch_size(schedule: str) -> int | None:
    """The batch a run with a step schedule ends with; None where the schedule cannot be read."""
    try:
        return parse_step_schedule(schedule)[-1].global_batch_size
    except ConfigError:
        return None


def samples_per_scheduled_iteration(run: RunGroups) -> int:
    """Samples that one iteration of --lr-warmup-iters, --lr-decay-iters and the like stands for.

    The global batch size that --rampup-batch-size grows to; with --step-batch-size-schedule, which names several, one
    microbatch on every data-parallel rank. Upstream has not read --rampup-batch-size since core 0.18.
    """
    training = run.training
    if training.step_batch_size_schedule is not None:
        return (training.micro_batch_size or 1) * run.data_parallel_size
    return training.global_batch_size or 1


def compute_schedule_lengths(run: RunGroups) -> SchedulerSteps:
    """Lengths of the curves of learning rate and weight decay, in samples. Raises ConfigError for a run without one."""
    training, scheduler = run.training, run.scheduler
    return compute_scheduler_steps(
        global_batch_size=samples_per_scheduled_iteration(run),
        train_iters=training.train_iters,
        train_samples=training.train_samples,
        lr_decay_iters=scheduler.lr_decay_iters,
        lr_decay_samples=scheduler.lr_decay_samples,
        lr_warmup_iters=scheduler.lr_warmup_iters,
        lr_warmup_samples=scheduler.lr_warmup_samples,
        lr_warmup_fraction=scheduler.lr_warmup_fraction,
        lr_wsd_decay_iters=scheduler.lr_wsd_decay_iters,
        lr_wsd_decay_samples=scheduler.lr_wsd_decay_samples,
    )


def units_agree(run: RunGroups) -> Iterator[str]:
    """A run counted in iterations has a schedule in iterations, a run counted in samples one in samples."""
    training = run.training
    # Both or neither is another rule's matter.
    if (training.train_iters is None) == (training.train_samples is None):
        return
    unit, other = ("iters", "samples") if training.train_iters is not None else ("samples", "iters")
    for stem in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        if getattr(run.scheduler, f"{stem}_{other}"):
            right = run.flag(f"{stem}_{unit}")
            yield f"{run.say(f'{stem}_{other}')} does not fit {run.say(f'train_{unit}')}; use {right}"


def there_is_a_step(run: RunGroups) -> Iterator[str]:
    """A run is at least as long as one step, and its learning rate has a length to decay over."""
    training = run.training
    if training.train_iters == 0 and not run.scheduler.lr_decay_iters:
        yield "--train-iters 0 leaves the learning rate nothing to decay over; give at least 1, or --lr-decay-iters"
    grows = training.rampup_batch_size is not None or training.step_batch_size_schedule is not None
    if training.train_samples is not None and not grows and training.train_samples < (training.global_batch_size or 0):
        yield f"{run.say('train_samples')} are less than one step of {run.say('global_batch_size')}; give more"


def warmup_ends_before_the_decay(run: RunGroups) -> Iterator[str]:
    """The warm-up leaves something of the decay's length, or of the run's where that is not given."""
    for unit in ("iters", "samples"):
        decay, warmup = getattr(run.scheduler, f"lr_decay_{unit}"), getattr(run.scheduler, f"lr_warmup_{unit}")
        length = decay or getattr(run.training, f"train_{unit}")
        if length and warmup and warmup >= length:
            yield (
                f"{run.say(f'lr_warmup_{unit}')} leaves nothing of "
                f"{run.say(f'lr_decay_{unit}' if decay else f'train_{unit}')} for the decay; "
                f"use a warm-up of at most {length - 1}, or a longer decay"
            )


def warmup_rises(run: RunGroups) -> Iterator[str]:
    """The warm-up ends at the learning rate, and begins below it."""
    rate = run.optimizer.lr
    if rate is not None and run.scheduler.lr_warmup_init > rate:
        yield f"{run.say('lr_warmup_init')} is above {run.say('lr')}, which the warm-up ends at; use {rate} or less"


def final_decay_has_a_length(run: RunGroups) -> Iterator[str]:
    """Warm-up, stable, decay (Hu et al., 2024)."""
    unit = "samples" if run.training.train_samples is not None else "iters"
    if run.scheduler.lr_decay_style == "WSD" and not getattr(run.scheduler, f"lr_wsd_decay_{unit}"):
        yield f"--lr-decay-style WSD needs --lr-wsd-decay-{unit}, the length of its final decay"


def constant_weight_decay_is_said_once(run: RunGroups) -> Iterator[str]:
    """Weight decay that does not change is --weight-decay."""
    if run.scheduler.weight_decay_incr_style != "constant":
        return
    for name in ("start_weight_decay", "end_weight_decay"):
        if getattr(run.scheduler, name) not in (None, run.optimizer.weight_decay):
            yield (
                f"{run.say(name)} has no effect with --weight-decay-incr-style constant; use --weight-decay, or linear "
                "or cosine"
            )


def weights_come_from_somewhere(run: RunGroups) -> Iterator[str]:
    """Weights are drawn, or loaded."""
    checkpoint = run.checkpoint
    if not run.model.perform_initialization and checkpoint.load is None and checkpoint.pretrained_checkpoint is None:
        yield f"{run.say('perform_initialization')} leaves the weights undefined; add --load or --pretrained-checkpoint"


def checkpoint_format_fits_the_sharding(run: RunGroups) -> Iterator[str]:
    """The checkpoint format of upstream's FSDP needs --use-megatron-fsdp."""
    if run.checkpoint.ckpt_format == "fsdp_dtensor" and not run.ddp.use_megatron_fsdp:
        yield "--ckpt-format fsdp_dtensor needs --use-megatron-fsdp; use torch_dist"


def upstream_knows_what_is_saved(run: RunGroups) -> Iterator[str]:
    """Its formats have a place for what upstream would have saved."""
    checkpoint, model = run.checkpoint, run.model
    if checkpoint.ckpt_format not in FOR_UPSTREAM:
        return
    written = "--ckpt-convert-format" if checkpoint.ckpt_convert_format is not None else "--ckpt-format"
    written = f"{written} {checkpoint.ckpt_format}"
    if checkpoint.async_save:
        yield f"{written} is written while training waits; leave out --async-save, or use --ckpt-format torch_dist"
    if "K" in (model.hybrid_layer_pattern or ""):
        yield f"{written} has no names for Kimi delta attention (letter K); use --ckpt-format torch_dist"
    if model.layernorm_zero_centered_gamma and not model.linear_norm_1p:
        yield f"{written} stores norms of delta nets less one; leave out {run.say('linear_norm_1p')}, or use torch_dist"
    if not checkpoint.no_save_optim:
        reason = None
        if run.optimizer.optimizer not in ("adam", "sgd"):
            reason = run.say("optimizer")
        elif model.use_mup:
            reason = run.say("use_mup")
        if reason is not None:
            yield f"{written} has no place for the optimizer's state with {reason}; use torch_dist, or --no-save-optim"
    if checkpoint.ckpt_format == "torch":
        expert_ranks = model.expert_tensor_parallel_size or model.tensor_model_parallel_size
        if model.expert_model_parallel_size > 1 and expert_ranks != model.tensor_model_parallel_size:
            yield (
                f"{written} has a file for each tensor-parallel rank, and {run.say('expert_tensor_parallel_size')} "
                f"divides experts otherwise; use the size {model.tensor_model_parallel_size}, or {UPSTREAM_TORCH_DIST}"
            )
        if model.pipeline_schedule == "zb-v":
            yield (
                f"{written} numbers layers as upstream's stages have them, and {run.say('pipeline_schedule')} lays "
                f"them out otherwise; use another schedule, or {UPSTREAM_TORCH_DIST}"
            )


def profiled_ranks_exist(run: RunGroups) -> Iterator[str]:
    """Ranks are counted from 0."""
    beyond = [rank for rank in run.profiling.profile_ranks if rank >= run.world_size]
    if beyond and (run.profiling.profile or run.profiling.record_memory_history):
        yield (
            f"--profile-ranks {beyond[0]} is none of the {run.world_size} ranks; give numbers below {run.world_size}"
        )


def copies_of_local_files_have_their_ranks(run: RunGroups) -> Iterator[str]:
    """Ranks that keep copies of each other's files form sets of the same size."""
    settings = run.checkpoint
    jump, factor, ranks = settings.replication_jump, settings.replication_factor, run.world_size
    if not (settings.saves_locally and settings.replication) or jump is None or ranks % (jump * factor) == 0:
        return
    if ranks % factor:
        others = [divisor for divisor in range(2, ranks + 1) if ranks % divisor == 0]
        remedy = f"use a factor of {' or '.join(map(str, others))}" if others else "leave --replication out"
    else:
        remedy = f"use a jump of {name_divisors(ranks // factor, jump)}"
    yield (
        f"{run.say('replication_jump')} x {run.say('replication_factor')} is no divisor of the {ranks} ranks, which "
        f"keep copies in sets of {factor}; {remedy}"
    )


LOOP_RELATIONS = (
    run_is_described, training_has_documents, there_is_a_step, warmup_ends_before_the_decay, warmup_rises,
    final_decay_has_a_length,
)  # fmt: skip
"""Relations that only our loop needs: a program with another loop need not say how long it trains."""
RELATIONS = (
    run_is_described, training_has_documents, pairs_can_be_compared, logits_can_be_kept, batch_is_divisible,
    evaluation_batch_is_divisible, growing_batch_is_possible, phases_have_one_batch_size,
    units_agree, there_is_a_step, warmup_ends_before_the_decay, warmup_rises,
    final_decay_has_a_length,
    constant_weight_decay_is_said_once, weights_come_from_somewhere, checkpoint_format_fits_the_sharding,
    bad_numbers_can_be_left, restarts_go_on_from_what_is_saved, upstream_knows_what_is_saved,
    copies_of_local_files_have_their_ranks, profiled_ranks_exist,
)  # fmt: skip

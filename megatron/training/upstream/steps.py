# SPDX-License-Identifier: Apache-2.0
"""Upstream's pieces for a custom training loop: model, optimizer, step, evaluation, a line of log."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core import device as device_module
from megatron.core.collectives import all_reduce
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.optimizer.clip_grads import is_counted
from megatron.core.optimizer.megatron_optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel.forward_backward import get_forward_backward_func
from megatron.core.placement import get_placement
from megatron.core.plan.stages import build_pipeline_layout, build_virtual_stages
from megatron.core.process_groups_config import Group, ProcessGroupCollection
from megatron.core.stacked_parameters import list_parameters
from megatron.core.taken_arguments import take_arguments
from megatron.core.tensor_parallel.parameters import declare_vocabulary
from megatron.core.upstream.batches import get_num_microbatches
from megatron.core.upstream.modules import Float16Module, unwrap_model
from megatron.training.arguments import make_run_config
from megatron.training.config.container import RunConfig
from megatron.training.current_run import CurrentRun
from megatron.training.global_vars import get_args
from megatron.training.recipes.vocabulary import compute_vocab_size
from megatron.training.setup import build_scheduler, tie_chunks
from megatron.training.upstream.checkpoints import load_checkpoint
from megatron.training.upstream.settings import is_last_rank


def get_model(
    model_provider_func: Callable[..., nn.Module],
    model_type: ModelType = ModelType.encoder_or_decoder,
    wrap_with_ddp: bool = True,
    config: Any = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> list[Any]:
    """This process's pipeline chunks on its device, in DistributedDataParallel unless told otherwise.

    model_provider_func: (pre_process, post_process) and, where it has parameters for them, vp_stage, config and
    pg_collection -> one chunk. With bf16 or fp16 each chunk is in a Float16Module, so that its logits are float32.
    model_type: the chunks then have it. config: of the model; from get_args() when None.
    """
    args = get_args()
    run_config = make_run_config(args)
    given, config = config, config or run_config.model
    groups = pg_collection or ProcessGroupCollection.current()
    shape = build_virtual_stages(config)
    layout = build_pipeline_layout(config, shape)
    # Upstream hands these only to providers that have a parameter of that name.
    known = inspect.signature(model_provider_func).parameters
    chunks: list[nn.Module] = []
    for index in range(shape.chunks):
        content = layout[shape.index(groups.pp.rank(), index)]
        vp_stage = index if shape.chunks > 1 else None
        offered = {"vp_stage": vp_stage, "config": given, "pg_collection": groups}
        offered = {name: value for name, value in offered.items() if name in known}
        with torch.device(device_module.current_device()):
            chunk = model_provider_func(pre_process=content.has_embedding, post_process=content.has_loss, **offered)
        chunk = chunk.to(device_module.current_device())
        chunk.model_type, chunk.vp_stage = model_type, vp_stage  # type: ignore[assignment]
        chunks.append(chunk)
    # Before wrapping: flat buffers take every parameter once.
    tie_chunks(chunks)
    if CurrentRun.tokenizer is not None:
        # Rows that pad the vocabulary are no tokens: checkpoints do not hold them.
        for chunk in chunks:
            declare_vocabulary(chunk, compute_vocab_size(run_config, CurrentRun.tokenizer))
    if config.bf16 or config.fp16:
        chunks = [Float16Module(getattr(chunk, "config", config), chunk) for chunk in chunks]
        for chunk in chunks:
            chunk.model_type = model_type  # type: ignore[assignment]
    if not wrap_with_ddp:
        for chunk in chunks:
            chunk.register_forward_hook(_hide_padding)
        return chunks
    wrapped = [
        DistributedDataParallel(getattr(chunk, "config", config), run_config.ddp, chunk, pg_collection=groups)
        for chunk in chunks
    ]
    for chunk, outside in zip(chunks, wrapped, strict=True):
        outside.model_type, outside.vp_stage = model_type, getattr(chunk, "vp_stage", None)  # type: ignore[assignment]
    return wrapped


def _hide_padding(model: nn.Module, inputs: Any, output: Any) -> Any:
    """Logits [b, s, v] of an evaluated model, as low as can be where rows only pad the vocabulary: probabilities are
    then of tokens, as they are of the exported model, which has no such rows."""
    inner = unwrap_model(model)
    if model.training or not getattr(inner, "post_process", False) or output.dim() != 3:
        return output
    placements = [get_placement(param, name) for name, param in inner.named_parameters()]
    vocabulary = [placement for placement in placements if placement.is_vocabulary and placement.valid_rows is not None]
    if not vocabulary or output.shape[-1] < vocabulary[-1].local_shape[0]:
        return output
    last, rows = vocabulary[-1], output.shape[-1]
    # All of them, or this rank's part.
    first = 0 if rows == last.full_shape[0] else ProcessGroupCollection.current().tp.rank() * rows
    tokens = min(max((last.valid_rows or 0) - first, 0), rows)
    lowest = torch.finfo(output.dtype).min
    return output if tokens == rows else nn.functional.pad(output[..., :tokens], (0, rows - tokens), value=lowest)


def setup_model_and_optimizer(
    model_type: ModelType,
    model_provider_func: Callable[..., nn.Module],
    checkpointing_context: Any = None,
    cfg_container: RunConfig | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> tuple[list[Any], MegatronOptimizer, OptimizerParamScheduler]:
    """Model, optimizer and learning-rate schedule of the settings, with what --load holds; get_args().iteration is then
    how far that was. checkpointing_context: of upstream's signature. cfg_container: from get_args() when None."""
    args = get_args()
    config = cfg_container or make_run_config(args)
    model = get_model(model_provider_func, model_type, pg_collection=pg_collection)
    optimizer = get_megatron_optimizer(config.optimizer, model, pg_collection=pg_collection)
    scheduler = build_scheduler(config, optimizer)
    args.iteration, args.num_floating_point_operations_so_far = 0, 0
    if config.checkpoint.load is not None:
        args.iteration, args.num_floating_point_operations_so_far = load_checkpoint(model, optimizer, scheduler)
    return model, optimizer, scheduler


@take_arguments(
    "forward_step_func data_iterator model optimizer opt_param_scheduler config forward_backward_func iteration=... "
    "pg_collection=None p2p_communicator=None",
    "groups are the current ones",
)
def train_step(
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    model: Sequence[Any],
    optimizer: MegatronOptimizer,
    opt_param_scheduler: OptimizerParamScheduler,
    config: Any,
    forward_backward_func: Callable[..., list[Any]] | None = None,
) -> tuple[dict[str, Tensor], int, bool, bool, int, Tensor | None, int | None, float | None]:
    """Forward, backward and update on one global batch of get_num_microbatches() microbatches.

    Returns (mean losses on the last stage, 1 if the update was skipped, whether to save now, whether to stop, exit
    code, gradient norm, zeros among the gradients, largest attention score): the 3rd to 5th and the last two are for
    loops of upstream's, and always False, False, 0, None, None here.
    """
    args = get_args()
    for chunk in model:
        chunk.zero_grad_buffer()
    # With --fp16 the loss is multiplied before backward; the schedule asks the config for it.
    config.grad_scale_func = optimizer.grad_scale_func
    schedule = forward_backward_func or get_forward_backward_func()
    losses = _bind_batch(schedule, forward_step_func, data_iterator, model)(forward_only=False)
    # With the function set, the schedule has called it already: twice would divide the gradients twice.
    if getattr(config, "finalize_model_grads_func", None) is None:
        finalize_model_grads(list(model))
    update = optimizer.step()
    if not update.skipped:
        opt_param_scheduler.step(get_num_microbatches() * args.micro_batch_size * args.data_parallel_size)
    return mean_losses(losses), int(update.skipped), False, False, 0, update.grad_norm, None, None


def _bind_batch(
    schedule: Callable[..., Any], forward_step_func: Callable[..., Any], data_iterator: Any, model: Sequence[Any]
) -> Callable[..., Any]:
    """The schedule over the micro-batches of one global batch of the current settings."""
    args = get_args()
    return functools.partial(
        schedule,
        forward_step_func=forward_step_func,
        data_iterator=data_iterator,
        model=list(model),
        num_microbatches=get_num_microbatches(),
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
    )


def mean_losses(losses: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Mean over microbatches and replicas of what loss functions returned: a scalar, or (sum, number of tokens)."""
    group = ProcessGroupCollection.current().dp_cp
    means = {}
    for name in losses[0] if losses else ():
        values = [torch.as_tensor(entry[name]) for entry in losses]
        # Loss functions of earlier releases return a mean instead of (sum, tokens): it counts as one token.
        pairs = [value if value.numel() == 2 else torch.stack([value, torch.ones_like(value)]) for value in values]
        total = torch.stack(pairs).float().sum(dim=0)
        all_reduce(total, group)
        means[name] = total[0] / total[1].clamp(min=1)
    return means


@take_arguments(
    "prefix forward_step_func data_iterator model iteration process_non_loss_data_func config=... verbose=... "
    "write_to_tensorboard=... non_loss_data_func pg_collection=None p2p_communicator=None",
    "groups are the current ones",
)  # losses are printed in any case, and a custom loop makes its writer
def evaluate_and_print_results(
    prefix: str,
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    model: Sequence[Any],
    iteration: int,
    process_non_loss_data_func: Callable[[Any, int, Any], Any] | None = None,
    non_loss_data_func: Callable[[Any], Any] | None = None,
) -> dict[str, float]:
    """Print mean losses of args.eval_iters global batches, after the prefix; returns them.

    process_non_loss_data_func: (data, iteration, None in place of a writer), called on the last rank. The data come
    from non_loss_data_func(model chunks), or are what the loss function returns for each microbatch of one more global
    batch when it is called with non_loss_data=True.
    """
    args = get_args()
    totals: dict[str, float] = {}
    # Restored as it was: a script may hold some chunks in evaluation mode on purpose.
    was_training = [chunk.training for chunk in model]
    for chunk in model:
        chunk.eval()
    schedule = functools.partial(get_forward_backward_func(), forward_only=True)
    forward = _bind_batch(schedule, forward_step_func, data_iterator, model)
    for _ in range(args.eval_iters):
        for name, value in mean_losses(forward()).items():
            totals[name] = totals.get(name, 0.0) + float(value) / args.eval_iters
    if process_non_loss_data_func is not None:
        data = forward(collect_non_loss_data=True) if non_loss_data_func is None else non_loss_data_func(model)
        if is_last_rank():
            process_non_loss_data_func(data, iteration, None)
    for chunk, mode in zip(model, was_training, strict=True):
        chunk.train(mode)
    texts = [f"{name} value: {value:.6E}" for name, value in totals.items()]
    print(f"validation loss at {prefix} (iteration {iteration}) | {' | '.join(texts)}", flush=True)
    return totals


@take_arguments(
    "loss_dict total_loss_dict learning_rate iteration loss_scale report_memory_flag skipped_iter grad_norm "
    "params_norm num_zeros_in_grad max_attention_logit=... pg_collection=... is_first_iteration=... "
    "seqlen_squared_sum_in_batch=... total_real_tokens_in_batch=..."
)  # its line has none of them
def training_log(
    loss_dict: Mapping[str, Tensor],
    total_loss_dict: dict[str, Any],
    learning_rate: float,
    iteration: int,
    loss_scale: float,
    report_memory_flag: bool,
    skipped_iter: int,
    grad_norm: Tensor | float | None,
    params_norm: float | None = None,
    num_zeros_in_grad: int | None = None,
) -> bool:
    """Add a step's losses to total_loss_dict; every args.log_interval steps print their means and reset.

    Returns report_memory_flag as it is: memory is told by --log-memory-interval.
    """
    for name, loss in loss_dict.items():
        if not skipped_iter:
            total_loss_dict[name] = total_loss_dict.get(name, 0.0) + float(loss)
    counted, skipped = "advanced iterations", "skipped iterations"
    total_loss_dict[counted] = total_loss_dict.get(counted, 0) + (not skipped_iter)
    total_loss_dict[skipped] = total_loss_dict.get(skipped, 0) + bool(skipped_iter)
    if iteration % get_args().log_interval:
        return report_memory_flag
    steps = max(1, total_loss_dict[counted])
    names = [name for name in total_loss_dict if name not in (counted, skipped)]
    fields = [f"iteration {iteration:8d}", f"learning rate: {learning_rate:.6E}"]
    fields += [f"{name}: {total_loss_dict[name] / steps:.6E}" for name in names]
    fields += [f"loss scale: {loss_scale:.1f}"]
    fields += [] if grad_norm is None else [f"grad norm: {float(grad_norm):.3f}"]
    fields += [] if params_norm is None else [f"params norm: {params_norm:.3f}"]
    fields += [] if num_zeros_in_grad is None else [f"num zeros: {num_zeros_in_grad}"]
    fields += [f"number of skipped iterations: {total_loss_dict[skipped]}"]
    print(" | ".join(fields), flush=True)
    total_loss_dict.clear()
    return report_memory_flag


def average_losses_across_data_parallel_group(losses: Sequence[Tensor], group: Group | None = None) -> Tensor:
    """Mean of each loss over the replicas, one after another in a tensor."""
    group = group if group is not None else ProcessGroupCollection.current().dp
    averaged = torch.cat([loss.detach().clone().view(1) for loss in losses])
    all_reduce(averaged, group)
    return averaged / group.size()


def calc_params_l2_norm(model: Any, force_create_fp32_copy: bool = False) -> float:
    """L2 norm of all parameters of the model. force_create_fp32_copy: it is computed in float64 anyway."""
    groups = ProcessGroupCollection.current()
    # Experts are divided over other processes than the rest, so their sums are added over other groups.
    sums = {of_experts: torch.zeros((), dtype=torch.float64) for of_experts in (False, True)}
    for chunk in model if isinstance(model, list | tuple) else [model]:
        for name, param in list_parameters(chunk):
            placement = get_placement(param, name)
            # Copies and rows of padding must not count twice.
            if is_counted(placement, groups):
                owned = [param.detach()[_slices(block.local_box)] for block in placement.pieces() if block.owned]
                sums[placement.is_expert] += sum(part.double().square().sum().cpu() for part in owned)
    for of_experts, total in sums.items():
        on_device = total.to(device_module.current_device())
        all_reduce(on_device, groups.get_model_copy(of_experts))
        sums[of_experts] = on_device.cpu()
    return float(sum(sums.values())) ** 0.5


def _slices(box: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in box)

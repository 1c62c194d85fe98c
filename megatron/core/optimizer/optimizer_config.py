# SPDX-License-Identifier: Apache-2.0
"""Settings of the optimizer: update rule and its constants, clipping, dtypes, loss scale."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.core.config_base import CheckedConfig, derived, flag
from megatron.core.errors import ConfigError
from megatron.core.optimizer.rule_table import RULES, reads_constants
from megatron.core.setting import Needs, NeedsGPU, PathText

if TYPE_CHECKING:
    import torch

    from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig

_QK_NORM = Needs("--qk-layernorm", lambda run: run.qk_layernorm)
# name=name binds each name now; a lambda reads a loop variable only when it is called.
_ADAM, _SGD, _LION, _MUON, _SOAP = (
    Needs(f"--optimizer {name}", lambda run, name=name: reads_constants(run, name))  # type: ignore[misc]
    for name in ("adam", "sgd", "lion", "muon", "soap")
)
_OFFLOAD = Needs("--optimizer-cpu-offload", lambda run: run.optimizer_cpu_offload)
_NO_PINNING = "it has no effect: there is no memory to pin"
_FP16 = Needs("--fp16", lambda run: run.fp16)
_DYNAMIC_SCALE = Needs("a dynamic loss scale", lambda run: run.loss_scale is None)

_DTYPE_FIELDS = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
_DTYPE_NAMES = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.uint8": "fp8"}


@dataclass(kw_only=True)
class OptimizerConfig(CheckedConfig):
    """Update rule, its constants, and clipping."""

    optimizer: str = flag(
        "adam", choices=(*RULES, "dist_muon", "adaptive_muon"),
        planned_choices=("adaptive_muon",),
        explanation="the remaining optimizers", kind="numerics")  # fmt: skip
    """Update rule: adam is AdamW (Loshchilov and Hutter, 2019), sgd has momentum, lion is Chen et al. (2023), muon
    orthogonalises the updates of matrices (Jordan et al., 2024); dist_muon is muon with the distributed optimizer; soap
    is Adam in the eigenbasis of Shampoo's preconditioners for matrices (Vyas et al., 2024), adam for the rest."""
    soap_precondition_frequency: int = flag(10, minimum=1, unit="iterations", kind="numerics", needs=_SOAP)
    """With --optimizer soap: updates between changes of the basis."""
    lr: float | None = flag(None, minimum=0, kind="numerics")
    """Learning rate at the end of the warm-up; the schedule scales it."""
    min_lr: float = flag(0.0, minimum=0, kind="numerics")
    """Learning rate the schedule ends at, and never goes below after the warm-up."""
    decoupled_lr: float | None = flag(None, minimum=0, kind="numerics")
    """Learning rate of the word embedding and the output layer at the end of the warm-up; --lr when not given."""
    decoupled_min_lr: float | None = flag(None, minimum=0, kind="numerics")
    """Learning rate that the schedule of --decoupled-lr ends at; --min-lr when not given."""
    weight_decay: float = flag(0.01, minimum=0, kind="numerics")
    """Weight decay, decoupled except in sgd; biases and one-dimensional weights get none."""
    apply_wd_to_qk_layernorm: bool = flag(False, kind="numerics", needs=_QK_NORM)
    """Weight decay also for the norms of queries and keys (--qk-layernorm)."""
    no_weight_decay_cond_type: str | None = flag(None, choices=("apply_wd_to_qk_layernorm",), kind="numerics")
    """Upstream's older way to say --apply-wd-to-qk-layernorm."""
    # Accepted because upstream's scripts pass it; it changes nothing that is computed.
    use_layer_wise_param_layout: bool = flag(True, kind="layout")
    """Upstream's layout for dist_muon, by whole matrices. Here buffers are cut anywhere; a matrix that lies on a cut
    is put together for its update."""
    clip_grad: float = flag(1.0, minimum=0, kind="numerics")
    """Largest global gradient norm (L2 over all parameters); 0 switches clipping off."""
    adam_beta1: float = flag(0.9, minimum=0, maximum=1, kind="numerics", needs=_ADAM)
    """Decay of the running mean of gradients."""
    adam_beta2: float = flag(0.999, minimum=0, maximum=1, kind="numerics", needs=_ADAM)
    """Decay of the running mean of squared gradients."""
    adam_eps: float = flag(1e-8, above=0, kind="numerics", needs=_ADAM)
    """Added to the root of the second moment."""
    sgd_momentum: float = flag(0.9, minimum=0, kind="numerics", needs=_SGD)
    """With --optimizer sgd: share of the last step's momentum that is kept; 0: no momentum, and no state."""
    lion_beta1: float = flag(0.95, minimum=0, maximum=1, kind="numerics", needs=_LION)
    """With --optimizer lion: weight of the running mean in the sign that is taken."""
    lion_beta2: float = flag(0.98, minimum=0, maximum=1, kind="numerics", needs=_LION)
    """With --optimizer lion: decay of the running mean of gradients."""
    muon_momentum: float = flag(0.9, minimum=0, maximum=1, kind="numerics", needs=_MUON)
    """With --optimizer muon: decay of the running mean of gradients."""
    muon_nesterov: bool = flag(False, kind="numerics", needs=_MUON)
    """With --optimizer muon: mix the gradient into the mean once more before it is orthogonalised."""
    muon_split_qkv: bool = flag(True, off_names=("--muon-no-split-qkv",), kind="numerics", needs=_MUON)
    """With --optimizer muon: queries, keys and values are three matrices, although one product computes them."""
    muon_scale_mode: str = flag(
        "spectral", choices=("spectral", "unit_rms_norm", "shape_scaling"), kind="numerics", needs=_MUON
    )
    """With --optimizer muon: factor of an [out, in] update: sqrt(max(out, in)), sqrt(out / in) or
    sqrt(max(1, out / in))."""
    muon_extra_scale_factor: float = flag(1.0, minimum=0, kind="numerics", needs=_MUON)
    """With --optimizer muon: another factor; 0.2 with spectral makes updates as large as Adam's."""
    muon_coefficient_type: str = flag(
        "quintic", choices=("simple", "quintic", "polar_express"), kind="numerics", needs=_MUON
    )
    """With --optimizer muon: coefficients of the Newton-Schulz steps."""
    muon_num_ns_steps: int = flag(5, minimum=1, kind="numerics", needs=_MUON)
    """With --optimizer muon: Newton-Schulz steps."""
    muon_fp32_matmul_prec: str = flag("medium", choices=("low", "medium", "high"), kind="numerics", needs=_MUON)
    """With --optimizer muon: Newton-Schulz steps in bfloat16 (low), or in float32 (medium, high), whose products a GPU
    makes of TensorFloat-32; medium and high are the same."""
    muon_use_syrk: bool = flag(False, kind="kernel", needs=_MUON)
    """With --optimizer muon: compute only half of each symmetric product of the Newton-Schulz steps, by blocks; faster
    where matrices are so large that a quarter of their rows still fills the device."""
    muon_tp_mode: str = flag(
        "duplicated", choices=("blockwise", "duplicated", "distributed"), kind="numerics", needs=_MUON
    )
    """With --optimizer muon: tensor-parallel ranks gather each matrix, or sum the Gram matrices of their shards, or
    orthogonalise each shard separately (blockwise: another algorithm, whose result depends on the ranks)."""
    muon_scalar_optimizer: str = flag("adam", choices=("adam", "lion"), kind="numerics", needs=_MUON)
    """With --optimizer muon: rule for embeddings, the output layer, biases and norms."""
    use_precision_aware_optimizer: bool = flag(False, kind="numerics")
    """With --optimizer adam: allow smaller dtypes of the optimizer's memory; updates are computed in fp32."""
    main_grads_dtype: str = flag("fp32", choices=("fp32", "bf16"), kind="numerics")
    """Dtype of the accumulated and summed gradients with --bf16; bf16 is --grad-reduce-in-bf16."""
    main_params_dtype: str = flag("fp32", choices=("fp32", "fp16"), kind="numerics")
    """Dtype of the main parameters in a --bf16 or --fp16 run."""
    exp_avg_dtype: str = flag(
        "fp32", choices=("fp32", "fp16", "bf16", "fp8"), planned_choices=("fp16", "fp8"),
        explanation="scaled optimizer state", kind="numerics")  # fmt: skip
    """Dtype of the first moment."""
    exp_avg_sq_dtype: str = flag(
        "fp32", choices=("fp32", "fp16", "bf16", "fp8"), planned_choices=("fp16", "fp8"),
        explanation="scaled optimizer state", kind="numerics")  # fmt: skip
    """Dtype of the second moment."""
    optimizer_cpu_offload: bool = flag(
        False,
        kind="kernel",
        gpu=NeedsGPU(
            lambda run: run.optimizer_cpu_offload, "state moves within the host's memory, which saves nothing"
        ),
    )
    """Keep main parameters and the optimizer's memory on the host, which updates them; gradients travel there and
    parameters back."""
    optimizer_offload_fraction: float = flag(1.0, minimum=0, maximum=1, kind="kernel", needs=_OFFLOAD)
    """Share of the optimizer's state that is on the host; the device keeps and updates the rest. It may change at a
    restart."""
    optimizer_offload_directory: PathText | None = flag(None, kind="kernel", needs=_OFFLOAD)
    """Directory on a local disk (NVMe) for files with that state, in place of the host's memory. They are gone when
    the run ends; checkpoints have what they hold."""
    overlap_cpu_optimizer_d2h_h2d: bool = flag(False, kind="kernel", needs=_OFFLOAD)
    """Let gradients travel to the host, and parameters back, while others are updated there."""
    use_torch_optimizer_for_cpu_offload: bool = flag(False, kind="kernel", needs=_OFFLOAD)
    """Ignored: the host always updates with torch's fused kernels."""
    pin_cpu_grads: bool = flag(
        True, kind="kernel", gpu=NeedsGPU(lambda run: run.optimizer_cpu_offload and not run.pin_cpu_grads, _NO_PINNING)
    )
    """With --optimizer-cpu-offload: gradients arrive in pinned memory of the host, to which a GPU copies faster."""
    pin_cpu_params: bool = flag(
        True, kind="kernel", gpu=NeedsGPU(lambda run: run.optimizer_cpu_offload and not run.pin_cpu_params, _NO_PINNING)
    )
    """With --optimizer-cpu-offload: main parameters are in pinned memory of the host, except the ones in files."""
    width_multiplier: float = derived(1.0, kind="numerics")
    """With --use-mup how many times as wide as the base model this one is; else 1."""
    clips_prediction_apart: bool = derived(False, kind="numerics")
    """With --mtp-detach-heads: gradients of multi-token prediction are clipped by a separate norm, and the others' is
    the one that is reported."""
    # Copied from the model's config, so that a command line cannot say it twice and differently.
    bf16: bool = derived(False, kind="numerics")
    """Model parameters are bfloat16; the optimizer keeps float32 main parameters."""
    fp16: bool = derived(False, kind="numerics")
    """Model parameters are float16; the optimizer keeps float32 main parameters and scales the loss."""
    loss_scale: float | None = flag(None, above=0, kind="numerics", needs=_FP16)
    """With --fp16: multiply the loss by this number, always. Without it the scale is dynamic."""
    # Far too high on purpose: some skipped steps find the largest scale that works, while a low start would lose small
    # gradients until it has grown.
    initial_loss_scale: float = flag(2**32, above=0, kind="numerics", needs=(_FP16, _DYNAMIC_SCALE))
    """With --fp16: dynamic loss scale at the start; halved until gradients no longer overflow."""
    min_loss_scale: float = flag(1.0, above=0, kind="numerics", needs=(_FP16, _DYNAMIC_SCALE))
    """With --fp16: smallest dynamic loss scale; gradients that overflow even so end the run."""
    loss_scale_window: float = flag(1000, minimum=1, unit="iterations", kind="numerics", needs=(_FP16, _DYNAMIC_SCALE))
    """With --fp16: iterations in a row without overflow after which the dynamic loss scale is doubled."""
    hysteresis: int = flag(2, minimum=1, unit="iterations", kind="numerics", needs=(_FP16, _DYNAMIC_SCALE))
    """With --fp16: iterations with overflow until the dynamic loss scale is halved."""

    # From here on upstream's fields that others know here, too; programs give and read them.
    use_distributed_optimizer: bool = derived(False, kind="layout")
    """As DistributedDataParallelConfig says; True must agree with it."""
    overlap_param_gather: bool = derived(False, kind="layout")
    """As DistributedDataParallelConfig says; True must agree with it."""
    overlap_param_gather_with_optimizer_step: bool = derived(False, kind="layout")
    """As DistributedDataParallelConfig says; True must agree with it."""
    params_dtype: torch.dtype | None = derived(kind="numerics")
    """Ignored: the dtype of the parameters is read from them."""
    store_param_remainders: bool = derived(True, kind="kernel")
    """Ignored: main parameters are kept in full."""
    log_num_zeros_in_grad: bool = derived(False, kind="report")
    """Ignored: `count_zeros()` counts them when it is called."""
    barrier_with_L1_time: bool = derived(True, kind="report")
    """Ignored: `use_timers` takes the stopwatches, whose barriers are set there."""
    timers: Any = derived(kind="report")
    """Ignored; see `use_timers`."""
    fp8_recipe: str | None = derived(kind="numerics")
    """Ignored: the model's config has the recipe."""
    reuse_grad_buf_for_mxfp8_param_ag: bool = derived(False, kind="kernel")
    """Only False: gradients have a separate buffer."""

    def normalize(self) -> None:
        super().normalize()
        # As upstream has them: None for a schedule that ends at 0, and torch's dtypes.
        self.min_lr = 0.0 if self.min_lr is None else self.min_lr
        for name in _DTYPE_FIELDS:
            setattr(self, name, _DTYPE_NAMES.get(str(getattr(self, name)), getattr(self, name)))

    def rules(self) -> Iterator[str]:
        if self.reuse_grad_buf_for_mxfp8_param_ag:
            yield "reuse_grad_buf_for_mxfp8_param_ag is not supported: gradients have their own buffer; leave it out"
        yield from self._rates_fall()
        yield from self._update_rule_is_defined()

    def _rates_fall(self) -> Iterator[str]:
        """A sentence for every learning rate whose schedule would end above its start."""
        if self.lr is not None and self.min_lr > self.lr:
            yield f"{self.say('min_lr')} is above {self.say('lr')}; use {self.lr} or less"
        if self.decoupled_min_lr is not None and self.decoupled_lr is None:
            yield f"{self.say('decoupled_min_lr')} needs --decoupled-lr"
        # Where --decoupled-min-lr is not given, --min-lr is the end of that schedule as well.
        lowest = "min_lr" if self.decoupled_min_lr is None else "decoupled_min_lr"
        if self.decoupled_lr is not None and getattr(self, lowest) > self.decoupled_lr:
            yield (
                f"{self.say(lowest)} is above {self.say('decoupled_lr')}; use a --decoupled-min-lr of "
                f"{self.decoupled_lr} or less"
            )

    def _update_rule_is_defined(self) -> Iterator[str]:
        """Constants and dtypes that the update rule can compute with."""
        for name in ("adam_beta1", "adam_beta2") if reads_constants(self, "adam") else ():
            if getattr(self, name) == 1:  # Adam divides by 1 - beta
                yield f"{self.say(name)} takes nothing of a gradient into the mean; give a number below 1, such as 0.95"
        if self.use_precision_aware_optimizer and self.optimizer != "adam":
            yield f"--use-precision-aware-optimizer works with --optimizer adam, not with {self.say('optimizer')}"
        if self.optimizer_cpu_offload and self.optimizer in RULES and RULES[self.optimizer].rest is not None:
            yield (
                f"--optimizer-cpu-offload works with --optimizer adam, sgd and lion, not with {self.say('optimizer')}, "
                "which computes with whole matrices; leave one out"
            )
        for name in _DTYPE_FIELDS:
            if getattr(self, name) != "fp32" and not self.use_precision_aware_optimizer:
                yield f"{self.say(name)} needs --use-precision-aware-optimizer"

    def check_agreement(self, wrappers: Iterable[DistributedDataParallelConfig]) -> None:
        """Raise ConfigError where this says another thing about the chunks than the configs of their wrappers do."""
        for wrapper in wrappers:
            for name in (
                "use_distributed_optimizer", "overlap_param_gather", "overlap_param_gather_with_optimizer_step",
            ):  # fmt: skip
                # False is the default, and says nothing.
                if getattr(self, name) and not getattr(wrapper, name):
                    raise ConfigError(
                        f"OptimizerConfig({name}=True), and the model was wrapped with DistributedDataParallelConfig("
                        f"{name}=False); give both the same"
                    )

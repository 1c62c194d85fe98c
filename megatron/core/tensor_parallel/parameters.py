# SPDX-License-Identifier: Apache-2.0
"""Declaration, naming and filling of parameters: once, and the same for every layout.

A layer declares what its parameter is (full shape, how it is split, which distribution it starts from) and allocates
only this rank's shard. The outermost constructor then calls `initialise_parameters`, which names and fills them:

    seed(name)  = hash(seed of the run, global name)
    full tensor = init(full shape) with a generator of that seed
    parameter   = placement.take(full tensor)

A weight is thus a function of (seed, global name, index), whatever the number of processes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from megatron.core.device import is_cpu
from megatron.core.errors import ConfigError
from megatron.core.host_memory import require_host_memory
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.placement import Kind, Placement, Split, get_placement, place
from megatron.core.stacked_parameters import bind_parts, list_parameters

_LARGE_BYTES = 1 << 30
_SMALLER = (
    "divide the model over more processes (--tensor-model-parallel-size, --pipeline-model-parallel-size), or make it "
    "smaller"
)

Initialiser = Callable[[Tensor, torch.Generator], object]
"""Fills a full-size tensor in place, taking random numbers from the generator only."""


def normal(std: float) -> Initialiser:
    """Return an initialiser that draws from the normal distribution around zero with standard deviation `std`."""

    def fill(tensor: Tensor, generator: torch.Generator) -> None:
        tensor.normal_(0.0, std, generator=generator)

    return fill


def xavier_uniform(tensor: Tensor, generator: torch.Generator) -> None:
    """Uniform in +-sqrt(6 / (inputs + outputs)) of a whole matrix [outputs, inputs] (Glorot and Bengio, 2010, equation
    16)."""
    nn.init.xavier_uniform_(tensor, generator=generator)


def ones(tensor: Tensor, generator: torch.Generator) -> None:
    """Fill with ones, as norms start."""
    tensor.fill_(1.0)


def zeros(tensor: Tensor, generator: torch.Generator) -> None:
    """Fill with zeros, as biases start."""
    tensor.zero_()


def by_blocks_of_rows(init: Initialiser, rows: int = 256) -> Initialiser:
    """The same distribution for a table whose padding depends on the layout: rows added at its end leave the others
    what they are. A generator's numbers depend on how many are asked for at once, so always whole blocks are drawn."""

    def fill(tensor: Tensor, generator: torch.Generator) -> None:
        for number, block in enumerate(tensor.split(rows)):
            # The last block is drawn whole, too, and cut off.
            drawn = tensor.new_empty(rows, *tensor.shape[1:])
            draw_values(init, drawn, generator, generator.initial_seed() + number)
            block.copy_(drawn[: block.shape[0]])

    return fill


def draw_values(init: Initialiser, tensor: Tensor, generator: torch.Generator, seed: int) -> None:
    """Fill a tensor. seed: for an initialiser of upstream's, (tensor), which draws from torch's default generator."""
    further = list(inspect.signature(init).parameters.values())[1:]
    # By name for torch's own: nn.init.normal_(tensor, mean, std, generator).
    if any(parameter.name == "generator" for parameter in further):
        init(tensor, generator=generator)  # type: ignore[call-arg]
        return
    if any(parameter.default is parameter.empty for parameter in further):
        init(tensor, generator)
        return
    with torch.random.fork_rng(devices=[] if is_cpu(tensor) else [tensor.device]):
        torch.manual_seed(seed)
        init(tensor)  # type: ignore[call-arg]


def parameter_dtype(config: ModelParallelConfig) -> torch.dtype:
    """Return the dtype of the parameters: config.params_dtype, or what bf16 / fp16 select."""
    dtype: torch.dtype = config.params_dtype or getattr(torch, config.compute_dtype_name)
    return dtype


def declare_parameter(
    full_shape: Sequence[int],
    *,
    kind: Kind | None = None,
    init: Initialiser = zeros,
    dtype: torch.dtype = torch.float32,
    splits: Sequence[Split] = (),
    valid_rows: int | None = None,
    is_copy: bool = False,
    partial_grad_axes: Sequence[str] = (),
    device: torch.device | None = None,
    parallel_dim: int | None = None,
) -> nn.Parameter:
    """An unnamed parameter holding this rank's shard of `full_shape`, filled later by `initialise_parameters`.

    kind: what the parameter is to the network (placement.py); when None a vector if it has one dimension, else a
    matrix. valid_rows: rows that are no padding, where rows are tokens; all when None. is_copy: another stage owns this
    parameter (tied embeddings). partial_grad_axes: axes over whose ranks the gradient is a partial sum. device: torch's
    default device when None. parallel_dim: see Placement.
    """
    placement = Placement(
        name="",
        full_shape=tuple(full_shape),
        splits=tuple(splits),
        valid_rows=valid_rows,
        is_copy=is_copy,
        partial_grad_axes=tuple(partial_grad_axes),
        kind=kind,
        parallel_dim=parallel_dim,
    )
    size = math.prod(placement.local_shape) * dtype.itemsize
    # Asking takes some 0.1 ms; all parameters together are looked at before they are filled.
    if size > _LARGE_BYTES and is_cpu(device or torch.get_default_device()):
        shape = " x ".join(map(str, placement.local_shape))
        require_host_memory(size, f"the {shape} elements of one parameter", _SMALLER)
    empty = torch.empty(placement.local_shape, dtype=dtype, device=device)
    parameter = nn.Parameter(empty, requires_grad=dtype.is_floating_point)
    place(parameter, placement)
    # Kept on the parameter, so that filling can wait until its global name is known.
    parameter.initialiser = init  # type: ignore[attr-defined]
    return parameter


def initialise_parameters(
    module: nn.Module,
    *,
    seed: int,
    draw_on_cpu: bool = False,
    draw: bool = True,
) -> None:
    """Name every parameter of `module` as in the whole model (`list_global_names`), and fill those that were declared.

    draw_on_cpu: draw full tensors in host memory; else on the parameter's device. The two devices' generators give
    different numbers, so runs that must start alike on both draw on the CPU. draw: False leaves the memory of drawn
    weights as it is, for a model whose weights are loaded.

    Raises MemoryShortageError where just the parameters are more than the host has: they have no content yet, and only
    with it do they take memory.
    """
    on_host = sum(param.numel() * param.element_size() for _, param in list_parameters(module) if is_cpu(param))
    require_host_memory(
        on_host,
        "the parameters of this process",
        _SMALLER,
    )
    for name, parameter in list_global_names(module):
        placement = get_placement(parameter, name)
        # A tied copy already knows its owner's name.
        placement = placement if placement.name else placement.renamed(name)
        place(parameter, placement)
        init = getattr(parameter, "initialiser", None)
        if init is None:  # of a plain torch module, which filled it itself
            continue
        device = torch.device("cpu") if draw_on_cpu else parameter.device
        if device.type == "meta" or not (draw or init in (ones, zeros)):
            continue
        _fill(parameter, placement, init, seed, device)


def fill_alone(module: nn.Module) -> None:
    """Fill the declared parameters of a layer that may be outside of a model, by a seed from torch's generator.

    They stay unnamed; inside a model `initialise_parameters` fills them once more.
    """
    seed = int(torch.randint(2**31, ()).item())
    for name, parameter in module.named_parameters():
        init = getattr(parameter, "initialiser", None)
        if init is not None and not parameter.is_meta:
            _fill(parameter, get_placement(parameter, name).renamed(name), init, seed, parameter.device)


def list_global_names(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(name in the whole model, parameter) for every parameter of `module`, each once.

    They are the names inside `module`, unless a part that holds some of several alike, such as a pipeline stage's
    layers, has a method `global_parameter_name` from its names to those inside the same part of the whole model.
    """
    parts = _list_naming_parts(module)
    for name, parameter in list_parameters(module):
        yield _translate(name, parts), parameter


def find_global_name(module: nn.Module, name: str) -> str:
    """From the name of a part of `module`, such as a layer, to its name in the whole model."""
    return _translate(name, _list_naming_parts(module)).rstrip(".")


def _list_naming_parts(module: nn.Module) -> list[tuple[str, nn.Module]]:
    # Asked of the class: a wrapper that forwards attributes would answer for the module inside it.
    return [(path, part) for path, part in module.named_modules() if hasattr(type(part), "global_parameter_name")]


def _translate(name: str, parts: Sequence[tuple[str, nn.Module]]) -> str:
    for path, part in reversed(parts):  # from the inside to the outside: paths of outer parts stay what they are
        prefix = f"{path}." if path else ""
        if name.startswith(prefix):
            name = prefix + part.global_parameter_name(name.removeprefix(prefix))  # type: ignore[operator]
    return name


def declare_vocabulary(module: nn.Module, vocab_size: int) -> None:
    """Declare how many rows of the word embedding and the output layer are tokens, where this was not declared.

    A model is built with the padded size; only who has the tokenizer knows how many tokens there are. Tables with fewer
    rows are of something else.
    """
    for name, parameter in list_parameters(module):
        placement = get_placement(parameter, name)
        if placement.is_vocabulary and placement.valid_rows is None and placement.full_shape[0] >= vocab_size:
            place(parameter, dataclasses.replace(placement, valid_rows=vocab_size))


def materialise_parameters(
    module: nn.Module, *, seed: int, device: torch.device, draw_on_cpu: bool = False, draw: bool = True
) -> None:
    """Give every named parameter that was built on the meta device memory, and fill it as `initialise_parameters` would
    have done. The parameters stay the same objects.

    Raises ConfigError for one that was not declared: only its module could fill it.
    """
    for _, parameter in list(list_parameters(module)):
        placement = get_placement(parameter, "")
        if parameter.device.type != "meta":
            if not draw:
                _clear_padding(parameter, placement)
            continue
        init = getattr(parameter, "initialiser", None)
        if init is None:
            raise ConfigError(
                f"--init-model-with-meta-device: {placement.name or 'a parameter'} of shape {placement.full_shape} has "
                "no initialiser; declare it with declare_parameter(), or leave the flag out"
            )
        memory = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        real = nn.Parameter(memory, requires_grad=parameter.requires_grad)
        # Placement, initialiser and queues are attributes, which swapping would take along with the old memory.
        vars(real).update(vars(parameter))
        # Modules, optimizers and hooks keep their references: the same object gets memory.
        torch.utils.swap_tensors(parameter, real)
        bind_parts(parameter)
        if draw or init in (ones, zeros):
            _fill(parameter, placement, init, seed, torch.device("cpu") if draw_on_cpu else device)
        else:
            _clear_padding(parameter, placement)


def _clear_padding(parameter: nn.Parameter, placement: Placement) -> None:
    """Zeros in the rows that no checkpoint fills: they take part in the softmax, and must not be what was in memory."""
    if placement.valid_rows is None:
        return
    with torch.no_grad():
        for piece in placement.pieces():
            (start, length), (local_start, _) = piece.box[0], piece.local_box[0]
            first = min(length, max(0, placement.valid_rows - start))
            parameter[local_start + first : local_start + length].zero_()


def derive_parameter_seed(seed: int, name: str) -> int:
    """Derive the seed of one parameter's generator, 63 bits; the same on every machine and in every Python process."""
    # Python's hash() of a string differs from process to process.
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1  # 63 bits: torch takes a signed number


def _fill(parameter: nn.Parameter, placement: Placement, init: Initialiser, seed: int, device: torch.device) -> None:
    # A generator for each parameter: its numbers do not depend on which others this rank holds, or in which order.
    generator = torch.Generator(device).manual_seed(derive_parameter_seed(seed, placement.name))
    # Float32 whatever the parameter's format, so that bf16 weights are the rounded float32 ones.
    full = torch.empty(placement.full_shape, dtype=torch.float32, device=device)
    with torch.no_grad():
        draw_values(init, full, generator, generator.initial_seed())
        parameter.copy_(placement.take(full))

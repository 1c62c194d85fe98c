# SPDX-License-Identifier: Apache-2.0
"""--log-comm-volume: what is counted equals the closed formulas of each axis.

X: bytes of one microbatch's hidden states [s, b, h] in float32; M: microbatches; L: layers. n members of a group send
2 (n-1)/n of a tensor in an all-reduce and (n-1)/n in an all-gather or reduce-scatter.
"""

from __future__ import annotations

import contextlib
import io
import re

import pytest

from megatron.training.hooks.measures import TrafficHook
from megatron.training.loop import train
from megatron.training.verify.parity import open_local_run
from megatron.training.verify.parity_layouts import parse_layout
from tests.parallel.harness import run_distributed
from tests.parallel.small_training import STYLES, own_rank, training

LAYERS, SEQUENCE, MICRO_BATCH, HIDDEN, HEADS = 4, 16, 2, 32, 4
VOCABULARY = 128
X = SEQUENCE * MICRO_BATCH * HIDDEN * 4
TOKENS = SEQUENCE * MICRO_BATCH

RECOMPUTED = (
    "tp2,--recompute-granularity full,--recompute-method uniform,--recompute-num-layers 1,"
    "--distribute-saved-activations"
)

Sent = dict[tuple[str, str], int]


def sent(layout: str) -> tuple[Sent, int, str]:
    """What this rank sends in a step, the bytes of its gradients, and what is printed."""
    flags = "--log-comm-volume,--log-interval=2,--train-iters=2,--lr-warmup-iters=0"
    config, recipe = training(STYLES["gpt2"], f"{layout},{flags}")
    printed = io.StringIO()
    with open_local_run(config, recipe, own_rank(config)) as run, contextlib.redirect_stdout(printed):
        train(run)
        (hook,) = (hook for hook in run.hooks.hooks if isinstance(hook, TrafficHook))  # type: ignore[attr-defined]
        gradient_bytes = sum(buffer.grad_data.nbytes for chunk in run.model for buffer in chunk.flat_buffers)
        return hook.step, gradient_bytes, printed.getvalue()


def large(counted: Sent) -> Sent:
    """Without scalars: losses, norms, numbers of tokens."""
    return {key: volume for key, volume in counted.items() if volume > 1000}


def microbatches(layout: str) -> int:
    sizes = parse_layout(layout).sizes
    return 12 // MICRO_BATCH // sizes["dp"]


def tensor_parallel(n: int, m: int) -> Sent:
    """Forward: embedding, attention and MLP of each layer; backward: both of each layer and the output layer. The loss
    sums three numbers per token, and two of its three all-reduces are for the logarithm."""
    hidden = (1 + 2 * LAYERS) + (2 * LAYERS + 1)
    return {("tp", "all_reduce"): m * 2 * (n - 1) * (hidden * X + 3 * TOKENS * 4) // n}


def recomputed(n: int, m: int) -> Sent:
    """Whole layers, one by one, whose inputs the ranks share: backward gathers them, and sums the attention's output
    again; it needs nothing of what comes after the MLP's second product."""
    volume = tensor_parallel(n, m)[("tp", "all_reduce")] + m * 2 * (n - 1) * LAYERS * X // n
    return {("tp", "all_reduce"): volume, ("tp", "all_gather"): m * (n - 1) * LAYERS * X // n}


def sequence_parallel(n: int, m: int) -> Sent:
    """Each all-reduce of a layer is a reduce-scatter on one side and an all-gather on the other, forward and backward;
    the output layer gathers the sequence. Column layers and the output layer keep their own tokens only and gather the
    others' once more in backward. The embedding is all-reduced, because learned positions are added to the
    whole sequence; its gradient is gathered. Gradients of norms and of row-parallel biases, which saw a part of the
    tokens, are all-reduced once per step."""
    scatters = 2 * LAYERS + (2 * LAYERS + 1)
    gathers = 2 * (2 * LAYERS + 1) + (2 * LAYERS + 1)
    partial = (2 * LAYERS + 1) * 2 * HIDDEN * 4 + 2 * LAYERS * HIDDEN * 4
    return {
        ("tp", "reduce_scatter"): m * (n - 1) * scatters * X // n,
        ("tp", "all_gather"): m * (n - 1) * gathers * X // n,
        ("tp", "all_reduce"): 2 * (n - 1) * (m * (X + 3 * TOKENS * 4) + partial) // n,
    }


def pipeline(chunks: int, m: int) -> list[Sent]:
    """Two stages. Hidden states go up and gradients come down over every border between them; the tied embeddings'
    gradient is summed over the first and the last stage."""
    tied = 2 * VOCABULARY * HIDDEN * 4 // 2
    borders = 2 * chunks - 1
    first, last = (borders + 1) // 2, borders // 2
    # The first rank sends hidden states over `first` borders and gradients over `last`, the other the reverse.
    return [
        {("pp", "send"): m * X * (first + last), ("pp", "all_reduce"): tied},
        {("pp", "send"): m * X * (last + first), ("pp", "all_reduce"): tied},
    ]


def ring(n: int, m: int) -> Sent:
    """Forward passes keys and values on n-1 times, backward again, and their gradients n times, in float32."""
    keys_and_values = 2 * X // n
    return {("cp", "send"): m * LAYERS * keys_and_values * ((n - 1) + (n - 1) + n)}


@pytest.mark.flags("--log-comm-volume", "--distribute-saved-activations")
@pytest.mark.parametrize("layout", ["tp2", RECOMPUTED, "tp2,sp", "pp2", "pp2,vpp2", "cp2", "dp2", "dp3,dist-opt"])
def test_volume_equals_the_formula(layout: str) -> None:
    sizes = parse_layout(layout).sizes
    (n,) = (size for size in sizes.values() if size > 1)
    m = microbatches(layout)
    ranks = run_distributed(sent, n, layout)
    for rank, (counted, gradient_bytes, printed) in enumerate(ranks):
        gradients = {("dp", "all_reduce"): round(2 * (n - 1) / n * gradient_bytes)}
        expected = {
            "tp2": tensor_parallel(n, m),
            RECOMPUTED: recomputed(n, m),
            "tp2,sp": sequence_parallel(n, m),
            "pp2": pipeline(1, m)[rank % 2],
            "pp2,vpp2": pipeline(2, m)[rank % 2],
            "cp2": ring(n, m) | gradients,
            "dp2": gradients,
            # gloo has no fast reduce-scatter: a whole all-reduce takes its place.
            "dp3,dist-opt": gradients | {("dp", "all_gather"): round((n - 1) / n * gradient_bytes)},
        }[layout]
        assert large(counted) == pytest.approx(expected, rel=1e-3)
        if rank == 0:
            mean = sum(volume for other, _, _ in ranks for volume in other.values()) / n / 1e6
            text = re.search(r"communication \(MB sent per rank\): ([^|]*) \|", printed)
            assert text is not None, printed
            assert sum(float(part.split()[1]) for part in text[1].split(", ")) == pytest.approx(mean, rel=1e-3)


def test_one_process_sends_nothing() -> None:
    counted, _, printed = sent("1")
    assert counted == {} and "communication (MB sent per rank): none |" in printed


@pytest.mark.flags("--log-comm-volume")
@pytest.mark.parametrize(
    ("shards", "instances", "strategy"),
    [(2, 1, "optim_grads_params"), (2, 1, "optim_grads"), (2, 2, "optim_grads_params")],
)
def test_volume_of_divided_parameters(shards: int, instances: int, strategy: str) -> None:
    """Layers are gathered for forward and again for backward, the rest, with the tied embeddings, once a microbatch; or
    everything once a step. Gradients are summed inside each instance whenever they come, over the instances once."""
    processes = shards * instances
    flags = f"--data-parallel-sharding-strategy={strategy},--num-distributed-optimizer-instances={instances}"
    ranks = run_distributed(sent, processes, f"dp{processes},fsdp2,--micro-batch-size=1,{flags}")
    m = 12 // processes
    layers = LAYERS * (12 * HIDDEN**2 + 13 * HIDDEN) * 4
    rest = (VOCABULARY + SEQUENCE + 2) * HIDDEN * 4
    gathered = layers + rest if strategy == "optim_grads" else m * (2 * layers + rest)
    expected = {
        ("dp", "all_gather"): (shards - 1) * gathered // shards,
        ("dp", "reduce_scatter"): (shards - 1) * m * (layers + rest) // shards,
    }
    if instances > 1:
        expected["dp", "all_reduce"] = 2 * (instances - 1) * (layers + rest) // shards // instances
    for counted, _, _ in ranks:
        assert large(counted) == pytest.approx(expected, rel=1e-3)

# SPDX-License-Identifier: Apache-2.0
"""Flags that upstream's scripts start a server with and that have no effect here: read with a note, or refused.

Of its engine's flags a note says why; how many values they take is in the table of former flags, since command
lines of training may have them, too. Flags of training describe the model once more: the checkpoint's settings are
used, and a note names those that are others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron.core.errors import ConfigError
from megatron.training.config.container import RunConfig
from megatron.training.config.run_groups import groups_of_fields
from megatron.training.flags.declarations import flags_by_spelling
from megatron.training.flags.flag import formers_by_name
from megatron.training.flags.given import ParsedFlags
from megatron.training.flags.parser import read_command_line

_BEGIN = "--inference-dynamic-batching-"
_NOTES: dict[str, tuple[str, ...]] = {
    "is always so here": (
        "--inference-dynamic-batching", "--enable-chunked-prefill", "--cache-mla-latents", "--decode-only-cuda-graphs",
    ),
    "has no effect: passes that read prompts are not recorded as CUDA graphs": (
        f"{_BEGIN}cuda-graph-mixed-prefill-count", "--inference-cuda-graph-all-prefills",
        "--inference-cuda-graph-max-tokens",
    ),
    "has no effect: passes of models with experts are not recorded as CUDA graphs": (
        "--moe-pad-experts-for-cuda-graph-inference",
    ),
    "has no effect: generation uses the kernels of training's forward": (
        "--flash-decode", "--symmetric-ar-type", "--nccl-all-reduce-for-prefill", "--inference-fuse-tp-communication",
        "--inference-disable-triton-nvls-kernels", "--inference-grouped-gemm-backend", "--mlp-chunks-for-prefill",
        "--inference-moe-disable-fused-quant-kernels", "--inference-moe-token-dispatcher-type",
        f"{_BEGIN}sampling-backend",
    ),
    "has no effect: there is no coordinator, rank 0 tells the others what to do": (
        "--inference-coordinator-port", "--inference-use-synchronous-zmq-collectives",
        "--no-inference-use-synchronous-zmq-collectives", "--inference-disable-ep-consensus",
        "--no-inference-disable-ep-consensus", f"{_BEGIN}prefix-caching-coordinator-policy",
        f"{_BEGIN}prefix-caching-routing-alpha", f"{_BEGIN}async-sched-mode",
        "--use-same-sampling-seed-across-dp-ranks",
    ),
    "has no effect: pages have 16 tokens, and those that nobody uses are kept until their memory is needed": (
        f"{_BEGIN}block-size", f"{_BEGIN}prefix-caching-eviction-policy",
    ),
    "has no effect: a request that is paused gives back all its pages, and recurrent states have one size": (
        f"{_BEGIN}paused-buffer-size-gb", f"{_BEGIN}mamba-memory-ratio", f"{_BEGIN}prefix-caching-mamba-gb",
        f"{_BEGIN}unified-memory-level",
    ),
    "has no effect: times and counts of requests are at /metrics": (
        f"{_BEGIN}track-paused-request-events", f"{_BEGIN}track-generated-token-events", "--inference-wandb-logging",
        "--no-inference-wandb-logging", "--no-inference-text-gen-server-logging",
    ),
    "has no effect: one engine serves all, and --inference-dynamic-batching-max-tokens bounds a pass": (
        "--inference-batch-times-seqlen-threshold", "--max-tokens-to-oom", "--use-legacy-static-engine",
    ),
    "has no effect: states have the number formats of training": (
        "--mamba-inference-conv-states-dtype", "--mamba-inference-ssm-states-dtype",
    ),
}  # fmt: skip
_REFUSED = {
    "--inference-shards": "prompts are read by the processes that go on with them; leave it out",
}


def read_upstream_flags(words: Sequence[str], strange: str) -> Iterator[str]:
    """Yield a note on each of the flags in a rest of a command line. Raises ConfigError, with what is to be seen
    (`strange`), for words that are none, and for flags that are refused."""
    reasons = {flag: reason for reason, flags in _NOTES.items() for flag in flags}
    rest = list(words)
    while rest:
        name, *value = rest.pop(0).split("=", 1)
        if name in _REFUSED:
            raise ConfigError(f"{name}: {_REFUSED[name]}")
        if name not in reasons:
            raise ConfigError(f"unrecognized arguments: {' '.join([name, *rest])}{strange}")
        several = formers_by_name()[name].nargs != 0
        if several and not value and (not rest or rest.pop(0).startswith("--")):
            raise ConfigError(f"{name} needs a value{strange}")
        yield f"{name} {reasons[name]}"


def take_training_flags(words: Sequence[str]) -> tuple[list[str], ParsedFlags]:
    """Split the rest of a command line into words that are no training flags, and the parsed training flags. Raises
    ConfigError for values that cannot be read."""
    engine = {*_REFUSED, *(flag for flags in _NOTES.values() for flag in flags)}
    training = ({*flags_by_spelling()} | {*formers_by_name()}) - engine
    rest: list[str] = []
    taken: list[str] = []
    now = rest
    for word in words:
        if word.startswith("--"):
            now = taken if word.partition("=")[0] in training else rest
        now.append(word)
    parsed = ParsedFlags()
    read_command_line(taken, parsed)
    if parsed.problems:
        raise ConfigError([problem.text for problem in parsed.problems])
    return rest, parsed


def compare_with_checkpoint(parsed: ParsedFlags, config: RunConfig) -> Iterator[str]:
    """Yield a note on each setting of the model and the tokenizer that the checkpoint has another value of, and one on
    the flags that say nothing about them."""
    others = []
    for dest, given in parsed.given.items():
        group = groups_of_fields().get(dest)
        if group not in ("model", "tokenizer"):
            others.append(given.written.split()[0])
        elif (own := getattr(getattr(config, group), dest)) != given.value:
            yield f"{given.written}: the checkpoint has {own}, which is used"
    if others:
        yield f"without effect where text is written: {', '.join(others)}"

# SPDX-License-Identifier: Apache-2.0
"""The content of each pipeline stage: arithmetic only.

| the settings say                      | layers of a stage                                                           |
|---------------------------------------|-----------------------------------------------------------------------------|
| nothing                               | all the same                                                                |
| layers of the first or last process   | as said, divided evenly over its chunks; the other processes share the rest |
| embedding, loss count as layers       | all the same with these counted, then they are taken off first and last     |
| a layout, or letters with cuts        | as written                                                                  |

With several chunks per process, virtual stages are laid on processes by VirtualStages; layers keep their global order.
config is a TransformerConfig, which itself checks here whether its layers can be assigned to the stages.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron.core.errors import ConfigError
from megatron.core.mesh import VirtualStages
from megatron.core.plan.letters import split_letters

if TYPE_CHECKING:
    from megatron.core.process_groups_config import Group

# Bounds what `(((t)*999)*999)*999` may write out, before the memory is there to notice.
_LONGEST = 65536


class StageContent(NamedTuple):
    """Content of one virtual stage of the pipeline."""

    layers: range
    """Global layer indices, from 0."""
    has_embedding: bool
    has_loss: bool
    """Output layer and loss."""
    has_prediction: bool = False
    """The layers of multi-token prediction, which follow the decoder's last layer."""
    ends_decoder: bool = False
    """The final norm: before multi-token prediction where there is any, else before the output layer."""


def build_virtual_stages(config: Any) -> VirtualStages:
    """Build the pipeline that the settings describe: its processes, and the chunks of each."""
    return VirtualStages(
        config.pipeline_model_parallel_size,
        config.virtual_pipeline_model_parallel_size or 1,
        folded=config.pipeline_schedule == "zb-v",
    )


def build_pipeline_layout(config: Any, shape: VirtualStages) -> list[StageContent]:
    """Assign the layers to virtual stages: the content of each, in the order of the stages. Raises ConfigError where
    they cannot be assigned so."""
    # Asked again with the sizes of the real groups, which a caller may have built apart from the config.
    problems = list(config.division_problems(shape.stages, shape.chunks))
    if problems:
        raise ConfigError(problems)
    if config.pipeline_model_parallel_layout is not None:
        counts = [stage.count("t") for stage in parse_layout(config.pipeline_model_parallel_layout)]
    elif "|" in (config.hybrid_layer_pattern or "").partition("/")[0]:
        counts = list(map(len, split_letters(config.hybrid_layer_pattern or "").segments))
    elif config.decoder_first_pipeline_num_layers is None and config.decoder_last_pipeline_num_layers is None:
        counts = _even_counts(config, config.num_layers, shape)
    else:
        counts = _uneven_counts(config, config.num_layers, shape)
    ends, last = list(accumulate(counts)), shape.count - 1
    decoder_end = find_decoder_end(config, shape)
    return [
        StageContent(
            range(end - count, end),
            has_embedding=stage == 0,
            has_loss=stage == last,
            has_prediction=config.mtp_num_layers is not None and stage == decoder_end,
            ends_decoder=stage == decoder_end,
        )
        for stage, (count, end) in enumerate(zip(counts, ends, strict=True))
    ]


def count_most_layers(config: Any) -> int | None:
    """Count the layers of the process of the pipeline that has the most; None where they cannot be assigned."""
    shape = build_virtual_stages(config)
    if not config.num_layers or any(config.division_problems(shape.stages, shape.chunks)):
        return None
    layers = [0] * shape.stages
    for stage, content in enumerate(build_pipeline_layout(config, shape)):
        layers[shape.holder(stage)[0]] += len(content.layers)
    return max(layers)


def find_decoder_end(config: Any, shape: VirtualStages) -> int:
    """Find the virtual stage of the final norm, and of multi-token prediction, if any: the last one unless a layout
    says otherwise."""
    written = config.pipeline_model_parallel_layout
    stages = [] if written is None else parse_layout(written)
    return next((index for index, stage in enumerate(stages) if "m" in stage), shape.count - 1)


class EmbeddingUse(NamedTuple):
    """Places of the word embedding's weight in a pipeline: it is looked up in on the first stage, once more for
    multi-token prediction, and it is the output layer where the two are tied."""

    ranks: tuple[int, ...]
    """Processes of the pipeline that hold it, ascending; with several of them their gradients are to be summed."""
    owner_chunk: dict[int, int]
    """Process -> the first of its chunks that uses it, from which later ones take it."""


def find_embedding_use(config: Any, shape: VirtualStages, *, is_tied: bool) -> EmbeddingUse:
    """Find the processes and chunks that hold the word embedding's weight."""
    owners: dict[int, int] = {}
    for stage, content in enumerate(build_pipeline_layout(config, shape)):
        if content.has_embedding or content.has_prediction or (content.has_loss and is_tied):
            rank, chunk = shape.holder(stage)
            owners.setdefault(rank, chunk)
    return EmbeddingUse(tuple(sorted(owners)), owners)


def find_content_of_stage(config: Any, pp_group: Group, vp_stage: int | None = None) -> StageContent:
    """Find the content of this process's stage; with several chunks, on its chunk `vp_stage`."""
    shape = fit_virtual_stages(config, pp_group)
    return build_pipeline_layout(config, shape)[shape.index(pp_group.rank(), vp_stage or 0)]


def fit_virtual_stages(config: Any, pp_group: Group) -> VirtualStages:
    """The pipeline that the settings describe, over the processes of a group: a model may be built on other groups than
    its config says."""
    shape = build_virtual_stages(config)
    if shape.stages == pp_group.size():
        return shape
    return VirtualStages(pp_group.size(), shape.chunks, shape.folded)


def parse_layout(text: str) -> list[str]:
    """`Et*3|(tt|)*2,tL` -> ["Ettt", "tt", "tt", "tL"]: the stages of a written layout, repetitions written out.

    Empty where the text is no layout or has more than 65536 letters.
    """
    expanded = _expand(text.replace(",", "").replace(" ", ""))
    return expanded.split("|") if expanded is not None and set(expanded) <= set("EtmL|") else []


def _even_counts(config: Any, layers: int, shape: VirtualStages) -> list[int]:
    embedding, loss = config.account_for_embedding_in_pipeline_split, config.account_for_loss_in_pipeline_split
    counts = [(layers + embedding + loss) // shape.count] * shape.count
    # Counted as layers and taken off again: the stages with embedding or loss get that many layers less.
    counts[0] -= embedding
    counts[-1] -= loss
    return counts


def _uneven_counts(config: Any, layers: int, shape: VirtualStages) -> list[int]:
    # With one stage both name the same process, and the last one written wins.
    given = {0: config.decoder_first_pipeline_num_layers, shape.stages - 1: config.decoder_last_pipeline_num_layers}
    fixed = {rank: count for rank, count in given.items() if count is not None}
    rest, others = layers - sum(fixed.values()), shape.stages - len(fixed)
    per_rank = [fixed.get(rank, rest // others if others else 0) for rank in range(shape.stages)]
    # Settings speak of processes, layers lie on virtual stages: each chunk of a process gets an equal share.
    return [per_rank[shape.holder(stage)[0]] // shape.chunks for stage in range(shape.count)]


def layout_problem(stages: list[str]) -> str | None:
    """Return what is wrong with the stages of a written layout, to be read after its name; None where nothing is."""
    whole = "".join(stages)
    if not stages:
        return "is not a layout; write stages as E, t and L between |, such as Ett|ttL"
    if whole.count("E") != 1 or whole.count("L") != 1 or not whole.startswith("E") or not whole.endswith("L"):
        return "must begin with the one embedding (E) and end with the one loss (L), such as Ett|ttL"
    if not stages[0] or not stages[-1]:
        return "leaves the first or the last stage empty; begin with E and end with L"
    if len([stage for stage in stages if "m" in stage]) > 1 or "t" in whole.partition("m")[2]:
        return "must have all m (multi-token prediction) on one stage, behind the last layer (t), such as Ett|ttmL"
    return None


def _expand(text: str) -> str | None:
    """Write out `x*3` and `(xy)*3`."""
    parts: list[list[str]] = [[]]
    position = 0
    while position < len(text):
        # A hand-written reader of two rules, repetition and brackets; each open bracket has a separate list of parts.
        letter = text[position]
        position += 1
        if letter == "(":
            parts.append([])
        elif letter == ")":
            if len(parts) == 1:
                return None
            inner = "".join(parts.pop())
            parts[-1].append(inner)
        elif letter == "*":
            digits = ""
            while position < len(text) and text[position] in "0123456789" and len(digits) < 6:
                digits += text[position]
                position += 1
            if not digits or not parts[-1] or len(parts[-1][-1]) * int(digits) > _LONGEST:
                return None
            parts[-1][-1] *= int(digits)
        else:
            parts[-1].append(letter)
        if sum(map(len, parts[-1])) > _LONGEST:
            return None
    return "".join(parts[0]) if len(parts) == 1 else None

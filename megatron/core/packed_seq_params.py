# SPDX-License-Identifier: Apache-2.0
"""Documents packed one after another into a single sequence (THD: tokens, heads, channels; no padding between them).

    tokens       [1, t]                      d0 d0 d0 d1 d1 d2 d2 d2 d2
    cu_seqlens   int32 [documents + 1]       0        3     5           9

Each token sees only earlier tokens of its document.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron.core.device import is_cpu
from megatron.core.errors import ConfigError, DataError
from megatron.core.process_groups_config import Group
from megatron.core.sequences.token_layout import TokenLayout


@dataclass
class PackedSeqParams:
    """Boundaries of the documents of a packed sequence; upstream's names.

    cu_seqlens_*: int32 [documents + 1], starts and the end of the last one; entries may repeat (empty documents). The
    `_padded` ones are where the documents lie in memory, when each is followed by padding. Queries and keys have the
    same documents. Bounds are read on the host, once: from cu_seqlens_host where it is given, which holds the same as
    cu_seqlens_q on the host; else a device that they lie on is waited for once per microbatch.
    """

    qkv_format: str = "thd"
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    cu_seqlens_q_padded: Tensor | None = None
    cu_seqlens_kv_padded: Tensor | None = None
    max_seqlen_q: int | Tensor | None = None
    max_seqlen_kv: int | Tensor | None = None
    cu_seqlens_host: Tensor | None = None
    cp_group: Group | None = None
    """The ranks that share this sequence; those that share every sequence when None."""
    local_cp_size: int | None = None
    """Their number; it must be cp_group's."""
    total_tokens: int | None = None
    """Length of the sequence, padding included; it must be the tensors'."""
    seq_idx: Tensor | None = None
    """int [1, t], the document of each token: in place of bounds, or in agreement with them."""
    pad_between_seqs: bool | None = None
    """True if padding follows documents: the bounds say so, and this changes nothing."""
    tokens_per_sample: Any = None
    """Refused: bounds say how long documents are."""
    _layout: TokenLayout | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.tokens_per_sample is not None:
            raise ConfigError("PackedSeqParams(tokens_per_sample=...) is not read; cu_seqlens_q says it: leave it out")
        size = 1 if self.cp_group is None else self.cp_group.size()
        if self.local_cp_size not in (None, size):
            raise ConfigError(
                f"PackedSeqParams(local_cp_size={self.local_cp_size}) with a cp_group of {size} ranks; give the group "
                "of as many ranks"
            )

    def layout(self, length: int) -> TokenLayout:
        """The documents of a sequence of `length` tokens; tokens after the last one are one more.

        Raises DataError for bounds that do not describe `length` tokens.
        """
        # Every layer asks, and to read the bounds of a tensor on a device is to wait for it.
        if self._layout is None or self._layout.length != length:
            self._layout = self._read(length)
        return self._layout

    def _read(self, length: int) -> TokenLayout:
        # Padding comes after a document's tokens, so that under a causal mask none of them sees it.
        candidates = (self.cu_seqlens_q_padded, self.cu_seqlens_host, self.cu_seqlens_q)
        if self.total_tokens not in (None, length):
            raise DataError(f"PackedSeqParams(total_tokens={self.total_tokens}) of a sequence of {length} tokens")
        given = next((bounds for bounds in candidates if bounds is not None), None)
        if self.seq_idx is not None:
            rows = self.seq_idx.flatten()
            if rows.numel() != length:
                raise DataError(f"seq_idx has a document for {rows.numel()} tokens, the sequence has {length}")
            told = [0, *(rows.diff().nonzero().flatten() + 1).tolist(), length]
            if given is not None and told != sorted({0, length, *given.flatten().tolist()}):
                raise DataError(
                    f"seq_idx has documents from {told[:8]}, cu_seqlens from {given.flatten().tolist()[:8]}"
                )
            given = torch.tensor(told)
        if given is None or self.qkv_format != "thd":
            raise DataError(f"PackedSeqParams needs qkv_format thd and cu_seqlens_q; found {self.qkv_format}, {given}")
        bounds = given.flatten().tolist()
        if bounds[:1] != [0] or bounds != sorted(bounds) or bounds[-1] > length:
            raise DataError(
                f"cu_seqlens must rise from 0 to at most the {length} tokens of the sequence; found {bounds[:8]}"
                + (f" ... {bounds[-1]}" if len(bounds) > 8 else "")
            )
        # A set, so that empty documents go; `length` ends the tokens after the last document.
        return TokenLayout.of_documents(sorted({*bounds, length}))


def pack_batch(
    batch: Mapping[str, Tensor], hybrid_cp: Sequence[Group] = ()
) -> tuple[dict[str, Tensor], PackedSeqParams | None]:
    """A batch whose samples carry cu_seqlens [b, m] as one packed sequence: [b, s] -> [1, b * s]; others as they are.

    A sample's bounds may be padded with its length s. Masks are left out: the bounds say what may be seen. Bounds on
    the host, as in a run's batches, go to the tokens' device; the host's copy is kept, too. hybrid_cp: the groups of
    which one shares the batch where it carries local_cp_size, the number of its ranks. Raises ConfigError where no
    group has that size.
    """
    if "cu_seqlens" not in batch:
        return dict(batch), None
    # One after another in memory, so that the documents of a sample begin where the sample before has ended.
    samples, length = batch["tokens"].shape
    offsets = torch.arange(samples, device=batch["cu_seqlens"].device).unsqueeze(1) * length
    bounds = torch.cat([(batch["cu_seqlens"] + offsets).flatten(), offsets.new_full((1,), samples * length)]).int()
    on_device = bounds.to(batch["tokens"].device, non_blocking=True)
    description: dict[str, Any] = {"cu_seqlens_q": on_device, "cu_seqlens_kv": on_device}
    if is_cpu(bounds):
        description["cu_seqlens_host"] = bounds
    if "max_seqlen" in batch:
        description |= dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), batch["max_seqlen"].max())
    if "local_cp_size" in batch:
        # int() reads the host's memory: the loader leaves this one there.
        description["cp_group"] = _find_group(int(batch["local_cp_size"]), hybrid_cp)
    left_out = ("cu_seqlens", "cu_seqlens_argmin", "max_seqlen", "attention_mask", "local_cp_size")
    packed = {name: x.reshape(1, samples * length, *x.shape[2:]) for name, x in batch.items() if name not in left_out}
    return packed, PackedSeqParams(**description)


def _find_group(size: int, groups: Sequence[Group]) -> Group:
    for group in groups:
        if group.size() == size:
            return group
    raise ConfigError(
        f"--hybrid-context-parallel: a batch is shared by {size} ranks, but forward_step has groups of "
        f"{', '.join(str(group.size()) for group in groups) or 'no'} ranks for it; hand model.groups.hybrid_cp to "
        "pack_batch, and its cp_group to get_batch_on_this_cp_rank, as pretrain_gpt.py does"
    )

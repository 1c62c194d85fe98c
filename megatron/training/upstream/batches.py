# SPDX-License-Identifier: Apache-2.0
"""Masks and positions of left-to-right batches, and what upstream prepares before the first one."""

from __future__ import annotations

import torch
from torch import Tensor

_async_calls_queue = None
"""Saves under way are kept by save_checkpoint(); maybe_finalize_async_save() waits for them."""


def _initialize_tp_communicators() -> None:
    """Nothing: --tp-comm-overlap makes what it needs when layers are built."""


def get_ltor_masks_and_position_ids(
    data: Tensor,
    eod_token: int,
    pad_token: int | None,
    reset_position_ids: bool,
    reset_attention_mask: bool,
    eod_mask_loss: bool,
    pad_mask_loss: bool,
    create_attention_mask: bool = True,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """(mask, loss mask, positions) of tokens [b, s]: bool [b or 1, 1, s, s], True where a token may not be seen, or
    None; float32 [b, s]; int64 [b, s].

    reset_...: positions restart, or earlier documents are hidden, after each eod_token. ..._mask_loss: those tokens
    do not count.
    """
    samples, length = data.shape
    loss_mask = torch.ones(samples, length, device=data.device)
    if eod_mask_loss:
        loss_mask.masked_fill_(data == eod_token, 0.0)
    if pad_mask_loss and pad_token is not None:
        loss_mask.masked_fill_(data == pad_token, 0.0)
    # A document ends with its eod_token, so that the next one begins after it.
    is_end = data == eod_token
    document = is_end.cumsum(dim=1) - is_end.long()  # [b, s], number of each token's document
    places = torch.arange(length, device=data.device).expand(samples, length)
    starts = torch.where(document.diff(dim=1, prepend=document.new_full((samples, 1), -1)) != 0, places, 0)
    positions = places - starts.cummax(dim=1).values if reset_position_ids else places.clone()
    mask = None
    if create_attention_mask:
        mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=data.device).triu(1)
        if reset_attention_mask:
            mask = mask | (document[:, None, :, None] != document[:, None, None, :])
    return mask, loss_mask, positions

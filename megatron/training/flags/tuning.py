# SPDX-License-Identifier: Apache-2.0
"""`--tuning NAME`: settings of fine-tuning that suit most models, so that they need not be looked up. Those that are
given win."""

from __future__ import annotations

from megatron.training.flags.given import ParsedFlags
from megatron.training.flags.preset import read_flags

_COMMON = (
    "--bf16 --use-distributed-optimizer --lr-decay-style cosine --lr-warmup-fraction 0.04 --clip-grad 1.0 "
    "--weight-decay 0"
)
TUNING = {
    "full": f"{_COMMON} --lr 1e-5 --min-lr 1e-6",
    "lora": f"{_COMMON} --lr 2e-4 --min-lr 2e-5 --lora-rank 16 --lora-alpha 32 --save-adapter-only",
    "dpo": f"{_COMMON} --lr 5e-7 --min-lr 5e-8 --dpo --dpo-beta 0.1",
    "distillation": f"{_COMMON} --lr 1e-4 --min-lr 1e-5",
}
"""Flags of each."""
_REPLACED_BY = {
    "bf16": ("fp16",),
    "lr_warmup_fraction": ("lr_warmup_iters", "lr_warmup_samples"),
    "min_lr": ("lr",),
    "lora_alpha": ("lora_rank",),
}
"""A field -> others that say the same, or of which it would be a share."""


def add_tuning_flags(parsed: ParsedFlags) -> None:
    """Enter what --tuning says and nobody has said otherwise, and note it."""
    entry = parsed.given.get("tuning")
    if entry is None or entry.value not in TUNING:
        return
    flags = {
        name: given
        for name, given in read_flags(f"--tuning {entry.value}", [TUNING[entry.value]]).items()
        if not parsed.given.keys() & {name, *_REPLACED_BY.get(name, ())}
    }
    parsed.notes.append(f"--tuning {entry.value} means {' '.join(given.written for given in flags.values())}")
    parsed.given = flags | parsed.given

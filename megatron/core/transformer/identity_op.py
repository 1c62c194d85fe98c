# SPDX-License-Identifier: Apache-2.0
"""Parts that do nothing, for specs that leave one out."""

from __future__ import annotations

from typing import Any

from torch import nn


class IdentityOp(nn.Module):
    """Takes the place of a part that a layer can do without: returns its first argument."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Return x as it is."""
        return x


class IdentityFuncOp(IdentityOp):
    """The same in the place of a function that is made for each call."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return a function that returns its argument."""
        return super().forward

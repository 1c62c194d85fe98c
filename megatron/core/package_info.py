# SPDX-License-Identifier: Apache-2.0
"""The release of upstream's whose interface is offered, in parts. Ours is megatron.core.OWN_VERSION."""

from __future__ import annotations

from megatron.core import __version__

MAJOR, MINOR, PATCH = (int(part) for part in __version__.split("."))
PRE_RELEASE = ""
__shortversion__ = __version__

# SPDX-License-Identifier: Apache-2.0
"""Products and attention that a GPU or an installed package has, and others do not."""

from __future__ import annotations

import torch

from megatron.core.device import device_name, is_cuda
from megatron.core.errors import ConfigError


def find_product_obstacle(
    device: torch.device, lowest: tuple[int, int], below: tuple[int, int] | None = None
) -> str | None:
    """Return why the device has no products that begin with compute capability `lowest`, and end before `below`; None
    where it has."""
    if not is_cuda(device):
        return "it needs a GPU"
    found = torch.cuda.get_device_capability(device)
    if lowest <= found and (below is None or found < below):
        return None
    wanted = f"{_say(lowest)} and above" if below is None else f"{_say(lowest)} to below {_say(below)}"
    return f"it needs a GPU of compute capability {wanted}, and {device_name()} has {_say(found)}"


def _say(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def activate_flash_attention(version: int) -> None:
    """Make torch's flash attention this version from now on: 2, which torch includes, or 3 or 4, from a package.

    Raises ConfigError where that package is missing or does not fit.
    """
    if version == 2:
        # Releases without it have no other version.
        getattr(torch.nn.attention, "restore_flash_attention_impl", lambda **options: None)(_raise_warn=False)
        return
    try:
        torch.nn.attention.activate_flash_attention_impl(f"FA{version}")
    except (AttributeError, ImportError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"--flash-attention-version {version} cannot be used here ({error}); install the package that brings it, "
            "or give --flash-attention-version 2, PyTorch's own"
        ) from error


def find_flash_package_obstacle(version: int) -> str | None:
    """Return why torch cannot take this version of flash attention from a package; None where it can. Leaves version 2
    in place."""
    try:
        activate_flash_attention(version)
    except ConfigError:
        return f"no package brings flash attention {version}"
    activate_flash_attention(2)
    return None

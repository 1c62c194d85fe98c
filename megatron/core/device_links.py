# SPDX-License-Identifier: Apache-2.0
"""Links between the GPUs of a machine, asked of the driver before anything has started CUDA."""

from __future__ import annotations

import ctypes
from typing import Any

_MOST_LINKS = 18
"""NVLinks of a GPU, at most, as NVIDIA's management library numbers them."""


def gpus_have_links() -> bool:
    """Return whether every GPU of this machine, of which there are several, has an active NVLink. Asks the driver, and
    does not touch CUDA, whose variables may still be set afterwards."""
    try:
        driver = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    count = ctypes.c_uint()
    if driver.nvmlInit_v2() != 0 or driver.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return False
    return count.value > 1 and all(_has_link(driver, index) for index in range(count.value))


def _has_link(driver: Any, index: int) -> bool:
    gpu, is_active = ctypes.c_void_p(), ctypes.c_uint()
    if driver.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(gpu)) != 0:
        return False
    return any(
        driver.nvmlDeviceGetNvLinkState(gpu, link, ctypes.byref(is_active)) == 0 and is_active.value == 1
        for link in range(_MOST_LINKS)
    )

# SPDX-License-Identifier: Apache-2.0
"""Peak rates of GPUs' matrix products, from their data sheets: the yardstick of a run's speed."""

from __future__ import annotations

from typing import NamedTuple


class Peaks(NamedTuple):
    """Dense matrix peaks of one product in TFLOP/s, from the data sheet, without sparsity. None: not supported."""

    half: float
    """float16; also bfloat16 where the chip has it."""
    tf32: float | None
    float32: float
    """Without tensor cores, as torch computes unless told that TF32 will do."""
    fp8: float | None
    has_bfloat16: bool = True


DENSE_PEAKS: dict[str, Peaks] = {
    "GB300": Peaks(2500, 1250, 83, 5000),
    "GB200": Peaks(2500, 1250, 80, 5000),
    "B300": Peaks(2250, 1125, 75, 4500),
    "B200": Peaks(2250, 1125, 75, 4500),
    "GH200": Peaks(989, 494, 67, 1979),
    "H200 NVL": Peaks(835, 418, 60, 1671),
    "H200": Peaks(989, 494, 67, 1979),
    "H100 NVL": Peaks(835, 418, 60, 1671),
    "H100 PCIe": Peaks(756, 378, 51, 1513),
    "H100": Peaks(989, 494, 67, 1979),
    "H800": Peaks(989, 494, 67, 1979),
    "H20": Peaks(148, 74, 44, 296),
    "A100": Peaks(312, 156, 19.5, None),
    "A800": Peaks(312, 156, 19.5, None),
    "A40": Peaks(150, 75, 37.4, None),
    "A30": Peaks(165, 82, 10.3, None),
    "L40S": Peaks(362, 183, 91.6, 733),
    "L40": Peaks(181, 90.5, 90.5, 362),
    "L20": Peaks(119.5, 59.8, 59.8, 239),
    "L4": Peaks(121, 60, 30.3, 242),
    "A10": Peaks(125, 62.5, 31.2, None),
    "RTX PRO 6000 Blackwell Workstation": Peaks(504, 252, 126, 1008),
    "RTX PRO 6000 Blackwell Server": Peaks(500, 250, 120, 1000),
    "RTX 6000 Ada": Peaks(364, 182, 91.1, 729),
    "RTX A6000": Peaks(155, 77.4, 38.7, None),
    # Of GeForce, with sums in float32, which is what training takes.
    "RTX 5090": Peaks(209.5, 104.8, 104.8, 419),
    "RTX 4090": Peaks(165.2, 82.6, 82.6, 330.3),
    "RTX 3090 Ti": Peaks(80, 40, 40, None),
    "RTX 3090": Peaks(71, 35.6, 35.6, None),
    "V100": Peaks(125, None, 15.7, None, has_bfloat16=False),
    "T4": Peaks(65, None, 8.1, None, has_bfloat16=False),
}
"""By product; the first one that a device's name contains as a word counts."""

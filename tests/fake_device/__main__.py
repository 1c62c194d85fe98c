# SPDX-License-Identifier: Apache-2.0
"""Runs on the fake device, from JSON on standard input to JSON on standard output:

    echo '{"mine": ["tp2,sp", "--num-layers 4 ..."]}' | python -m tests.fake_device LIBRARY

Each entry is a layout (megatron/training/verify/parity_layouts.py) and flags, and `stages` where one rank of each stage
is enough; the answer has what each rank did in its second iteration, or the traceback of what went wrong.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.fake_device.device import install, leave


def main() -> None:
    """Answer all requests."""
    install(Path(sys.argv[1]))
    from tests.fake_device.steps import run_layout

    answers: dict[str, Any] = {}
    for name, (layout, flags, *which) in json.load(sys.stdin).items():
        try:
            # What a run prints is not asked for.
            with contextlib.redirect_stdout(sys.stderr):
                answers[name] = [dataclasses.asdict(seen) for seen in run_layout(layout, flags.split(), *which)]
        except Exception:
            answers[name] = traceback.format_exc()
    print(json.dumps(answers))
    leave()


if __name__ == "__main__":
    main()

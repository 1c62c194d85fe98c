# SPDX-License-Identifier: Apache-2.0
"""All comparisons on the CPU, by Triton's interpreter: `TRITON_INTERPRET=1 python -m tests.kernels [NAME ...]`.

Prints a JSON object: name of a comparison -> "", or the traceback of its failure.
"""

from __future__ import annotations

import json
import sys
import traceback

import torch

from tests.kernels.comparisons import COMPARISONS


def main() -> None:
    """Run the named comparisons, or all."""
    torch.set_num_threads(1)
    answers = {}
    for name in sys.argv[1:] or COMPARISONS:
        try:
            COMPARISONS[name]("cpu")
            answers[name] = ""
        except Exception:
            answers[name] = traceback.format_exc()
    print(json.dumps(answers))


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""All comparisons on the CPU, by Triton's interpreter: `TRITON_INTERPRET=1 python -m tests.kernels [NAME ...]`.

Prints a JSON object: name of a comparison -> "", or the traceback of its failure. Exits with 1 where one has failed,
else with 0.
"""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any

import torch
from triton.runtime import interpreter

from tests.kernels.training_comparisons import ALL_COMPARISONS


def convert_scalars() -> None:
    """Let Python's range take a scalar of the interpreter, which is an array of one element: numpy's newer releases
    convert only arrays without dimensions."""
    patch = interpreter._patch_lang_tensor

    def patch_further(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_further


def main() -> int:
    """Run the named comparisons, or all; returns the exit status."""
    convert_scalars()
    torch.set_num_threads(1)
    answers = {}
    for name in sys.argv[1:] or ALL_COMPARISONS:
        try:
            ALL_COMPARISONS[name]("cpu")
            answers[name] = ""
        except Exception:  # the next ones are to be heard, too
            answers[name] = traceback.format_exc()
    print(json.dumps(answers))
    return int(any(answers.values()))


if __name__ == "__main__":
    sys.exit(main())

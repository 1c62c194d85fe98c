# SPDX-License-Identifier: Apache-2.0
"""What the tests of recorded command lines share: running one in process, and telling problems apart."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from megatron.core.errors import ConfigError
from megatron.training.flags.read import Examination, examine, read_run_config

# Upstream's name of a value -> ours, where they differ.
OUR_NAMES = {
    "accumulate_allreduce_grads_in_fp32": "grad_reduce_in_fp32",
    "num_experts": "num_moe_experts",
}
# Values that mean something else here, and why they are not compared.
NOT_COMPARED = {
    "apply_rope_fusion": "upstream switches a fusion off where there is nothing to fuse; here it stays as asked",
    "bias_gelu_fusion": "likewise",
    "overlap_p2p_comm": "upstream switches it off without an interleaved schedule; here it stays as asked",
    "align_param_gather": "likewise",
    "check_for_nan_in_loss_and_grad": "upstream stops looking for NaN with fp16; here loss scaling is known to it",
    "async_save": "upstream drops it without a persistent worker; here a thread saves",
    "async_strategy": "here both values are the same",
    "te_rng_tracker": "Transformer Engine is not used",
    "use_layer_wise_distributed_optimizer": "no flag of that name",
}
_DTYPES = {"float32": "torch.float32", "bfloat16": "torch.bfloat16", "float16": "torch.float16"}


@dataclass(frozen=True)
class Outcome:
    """How a command line ended."""

    examination: Examination
    is_accepted: bool
    errors: list[str]

    def of_kind(self, *kinds: str) -> list[str]:
        return [problem.text for problem in self.examination.problems if problem.kind in kinds]


def run(argv: list[str], environ: Mapping[str, str]) -> Outcome:
    """The command line with --print-config, as a user would check it. Only ConfigError or exit 0 will do."""
    try:
        with redirect_stdout(io.StringIO()):
            read_run_config([*argv, "--print-config"], environ)
    except SystemExit as stop:
        assert stop.code == 0
        return Outcome(examine(argv, environ), True, [])
    except ConfigError as error:
        for problem in error.problems:
            assert "\n" not in problem and len(problem) < 1000
            assert re.search(r"--[a-z]|environment|NVTE|unexpected|run\.yaml", problem), problem
        return Outcome(examine(argv, environ), False, error.problems)
    raise AssertionError("--print-config went on to train")


def our_value(examination: Examination, name: str) -> str:
    """A value after derivation, written as upstream's inventory writes it."""
    config = examination.config
    if name == "params_dtype":
        return _DTYPES[config.model.compute_dtype_name]
    if name == "moe_ffn_hidden_size" and config.model.num_moe_experts is None:
        return "None"
    if name == "data_parallel_size":
        return str(config.data_parallel_size if config.is_divisible else None)
    return str(examination.value_of(OUR_NAMES.get(name, name)))


def same(ours: str, upstream: str) -> bool:
    """Equal but for spelling: `None` and `False` for a switch upstream leaves unset."""
    return ours == upstream or {ours, upstream} == {"None", "False"}


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))

# SPDX-License-Identifier: Apache-2.0
"""--site-topology: a copy of the optimizer state at each site, and no copy of the model across two."""

from __future__ import annotations

from megatron.core.errors import ConfigError
from megatron.training.config.sites import read_topology
from megatron.training.flags.declarations import flags_by_spelling
from megatron.training.flags.given import ParsedFlags


def add_topology(parsed: ParsedFlags) -> None:
    """Enter what follows from the sites of --site-topology for synchronous training; what was written and says
    otherwise is a problem."""
    entry = parsed.given.get("site_topology")
    if entry is None:
        return
    try:
        count = len(read_topology(str(entry.value)))
    except ConfigError as error:
        parsed.misspelt(str(error), entry.flag)
        return
    replicas = parsed.given.get("diloco_replicas")
    name = "--num-distributed-optimizer-instances" if replicas is None else "--diloco-replicas"
    flag = flags_by_spelling()[name]
    written = parsed.given.get(flag.dest)
    if written is not None and written.value != count:
        parsed.misspelt(f"{written.written}, and {entry.written} has {count} sites; give {count}", flag)
    if replicas is not None:
        return
    if written is None:
        parsed.give(flag, name, [str(count)], "--site-topology")
    stages, order = parsed.given.get("pipeline_model_parallel_size"), flags_by_spelling()["--use-tp-pp-dp-mapping"]
    if stages is not None and stages.value > 1:
        # In the usual order the first stage would be at one site, and the last one at another.
        parsed.give(order, order.name, [], "--site-topology")

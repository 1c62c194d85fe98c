# SPDX-License-Identifier: Apache-2.0
"""The base of models of images: whole on every pipeline stage that has one, divided by tensor parallelism alone."""

from __future__ import annotations

import dataclasses

from megatron.core.errors import ConfigError
from megatron.core.process_groups_config import ProcessGroupCollection, SingleRankGroup
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class VisionModule(MegatronModule):
    """A model of images, which knows its groups: `pg_collection`, with one pipeline stage and whole sequences."""

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None) -> None:
        """Raises ConfigError for a config with sequence parallelism: the patches of an image need not divide."""
        super().__init__(config)
        if config.sequence_parallel:
            raise ConfigError(
                "sequence_parallel of a model of images is True, and its patches need not divide over the ranks; "
                "give its config sequence_parallel=False"
            )
        groups = pg_collection if pg_collection is not None else ProcessGroupCollection.current()
        alone = SingleRankGroup()
        self.pg_collection = dataclasses.replace(groups, pp=alone, cp=alone, embd=None, pos_embd=None)

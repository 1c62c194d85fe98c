"""Which process holds which stretch of a pipeline's layers: arithmetic only.

A pipeline of `stages` processes with `chunks` stretches each runs through stages * chunks virtual stages:

    looped   rank 0: 0 4    rank 1: 1 5    rank 2: 2 6    rank 3: 3 7      (interleaved, Narayanan et al., 2021)
    folded   rank 0: 0 7    rank 1: 1 6    rank 2: 2 5    rank 3: 3 4      (V shape, Qi et al., 2024)

With one chunk both are the plain pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class VirtualStages:
    """Shape of a pipeline."""

    stages: int
    """Processes in a row."""
    chunks: int = 1
    """Stretches of layers on each."""
    folded: bool = False
    """Every second round runs backwards, so that the first process also holds the last layers."""

    @property
    def count(self) -> int:
        """Virtual stages in all."""
        return self.stages * self.chunks

    def index(self, rank: int, chunk: int) -> int:
        """The virtual stage that is this chunk of this process."""
        return chunk * self.stages + self._turned(rank, chunk)

    def holder(self, index: int) -> tuple[int, int]:
        """(rank, chunk) of a virtual stage."""
        chunk, place = divmod(index, self.stages)
        return self._turned(place, chunk), chunk

    def _turned(self, place: int, chunk: int) -> int:
        return self.stages - 1 - place if self.folded and chunk % 2 else place

"""Which bucket is reduced when.

Backward fills gradients from the last layer to the first. During the last microbatch's backward every parameter
reports; when all of a bucket have, and all buckets before it have been started, the bucket's reduction starts while
backward goes on:

    backward   | layer 4 | layer 3 | layer 2 | layer 1 | embedding |
    link                 | bucket 4,3        | bucket 2,1          | bucket embedding |

The order is fixed, so that all processes agree on it even where one of them gets no gradient for some parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from megatron.core.distributed.bucket import Bucket


class GradSync:
    """Starts the buckets of one model chunk, and finishes them.

    buckets: in the order in which backward completes them, each with its parameters.
    """

    def __init__(self, buckets: Sequence[tuple[Bucket, Sequence[nn.Parameter]]]) -> None:
        self.buckets = [bucket for bucket, _ in buckets]
        self._sizes = [len(params) for _, params in buckets]
        self._place: Mapping[nn.Parameter, int] = {
            param: position for position, (_, params) in enumerate(buckets) for param in params
        }
        self.reset()

    def reset(self) -> None:
        """Forget the last step: from now on gradients are only accumulated."""
        self._missing = list(self._sizes)
        self._next = 0
        self._is_last = False
        for bucket in self.buckets:
            bucket.is_started = False

    def expect_last(self) -> None:
        """From now on each gradient that arrives is its parameter's last of this step."""
        self._is_last = True

    def arrived(self, param: nn.Parameter) -> None:
        """A parameter's gradient has been added to its buffer."""
        if not self._is_last:
            return
        position = self._place[param]
        assert not self.buckets[position].is_started, (
            f"a gradient of shape {tuple(param.shape)} arrived after its bucket was reduced; grad sync was enabled "
            "before the last microbatch"
        )
        self._missing[position] -= 1
        while self._next < len(self.buckets) and self._missing[self._next] == 0:
            self._start_next()

    def start(self) -> None:
        """Start whatever has not been started; all gradients must be there."""
        while self._next < len(self.buckets):
            self._start_next()

    def finish(self) -> None:
        """Start what has not been started and wait for all of it."""
        self.start()
        unfinished = self.buckets
        while unfinished:
            unfinished = [bucket for bucket in unfinished if bucket.advance()]

    def _start_next(self) -> None:
        self.buckets[self._next].start_reduce()
        self._next += 1

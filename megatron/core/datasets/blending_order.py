# SPDX-License-Identifier: Apache-2.0
"""The order of a blend: which dataset each of its samples comes from, in plain numpy.

Step s takes from the dataset that is furthest behind its share, the largest weights[d] * max(s, 1) - drawn[d], the
first of equal ones. The rule is Megatron-LM's, and so is every bit of the result.

It is sequential: a step depends on all draws before it. Three things make it quick without a compiler:

- The counts are never far from weights * step, and after some steps no longer depend on where they started. So the
  steps are cut into segments that advance side by side, each from a guess of its counts. A segment whose guess differs
  from what the segment before it arrived at is run again from there: piece by piece, until one ends as it did before,
  so that the rest holds. When every piece starts where the one before it ended, the whole is the sequential result.
- Only the count of a rare dataset, drawn less than once or twice in a segment, depends on what happened long before.
  Its guess is low, as a segment soon makes up for a missing draw, and one that finds a draw tells all later ones.
- The dataset that is drawn is always about as far behind: of a hundred datasets most are not in question for some
  steps. So only those are compared that reach a certain level within a window of steps. When what was drawn lay above
  the level, nothing that was left out could have come first; otherwise the window is run again with all datasets.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_PLAIN_BELOW = 20_000  # samples up to which the plain loop is as fast
_SEGMENTS = 2048  # their table of candidates stays in the processor's cache
_HEAD_STEPS = 256  # the first piece of a segment: after so many steps most have forgotten their guess
_PIECES = 4  # of a segment
_FEW_WRONG = 8  # segments; so few are quicker one after the other
_MAX_ROUNDS = 16
_TRIALS = 2  # runs of all heads, to find draws of rare datasets
_RARE_BELOW = 2  # draws in a segment
_TABLE_ABOVE = 24  # datasets; fewer are compared all at once
_SPENT = 2.0**62  # a count that is never drawn from


def build_blending_indices(weights: Array, size: int) -> tuple[Array, Array]:
    """(dataset_index int16 [size], dataset_sample_index int64 [size]): the dataset of each step, and how often it was
    drawn before. Weights sum to 1.
    """
    return _draw(np.asarray(weights, dtype=np.float64), size, None)


def build_exhaustive_blending_indices(sizes: Array) -> tuple[Array, Array]:
    """As build_blending_indices with weights by size, and every dataset used up exactly once."""
    limits = np.asarray(sizes, dtype=np.int64)
    total = int(limits.sum())
    return _draw(limits / total, total, limits.astype(np.float64))


def _draw(weights: Array, size: int, limits: Array | None) -> tuple[Array, Array]:
    """See build_blending_indices. Counts are float64 throughout: exact below 2^53, and what the rule computes with."""
    if size < _PLAIN_BELOW:
        draws, ranks, _ = _draw_plainly(weights, 0, size, np.zeros(len(weights)), limits)
        return draws, ranks
    segments = _Segments(weights, size, limits)
    segments.run_from_guesses()
    segments.repair()
    return segments.draws.reshape(-1)[:size], segments.ranks.reshape(-1)[:size]


class _Segments:
    """All steps, in segments of the same length, each in pieces: a short head, and what is left in equal parts."""

    def __init__(self, weights: Array, size: int, limits: Array | None) -> None:
        self.weights, self.limits = weights, limits
        self.length = -(size // -_SEGMENTS)
        self.head = min(_HEAD_STEPS, max(1, self.length // 2))
        self.first_steps = np.arange(0, size, self.length)
        count, datasets = len(self.first_steps), len(weights)
        self.rare = weights * self.length < _RARE_BELOW
        # With more rare datasets than steps in a head, no trial could find a draw of each; all are then guessed alike.
        if self.rare.sum() > self.head or weights[self.rare].sum() > 0.5:
            self.rare[:] = False
        self.bounds = [0, *np.linspace(self.head, self.length, _PIECES, dtype=int).tolist()]
        self.starts = np.empty((count, _PIECES, datasets))  # counts before each piece
        self.ends = np.empty((count, _PIECES, datasets))  # and after it
        self.draws = np.empty((count, self.length), dtype=np.int16)
        self.ranks = np.empty((count, self.length), dtype=np.int64)

    def run_from_guesses(self) -> None:
        """Every head from a guess, every tail from where its head ended."""
        everything = np.arange(len(self.first_steps))
        counts = np.floor(self.first_steps[:, None] * self.weights[self.rare])
        for _ in range(_TRIALS if self.rare.any() else 0):
            self.starts[:, 0] = self._guess_counts(counts)
            self._run(everything, 0)
            # A draw that one segment found has happened for all later ones.
            counts[1:] = np.maximum(counts[1:], np.maximum.accumulate(self.ends[:-1, 0, self.rare]))
        self.starts[:, 0] = self._guess_counts(counts)
        for piece in range(_PIECES):
            if piece:
                self.starts[:, piece] = self.ends[:, piece - 1]
            self._run(everything, piece)

    def repair(self) -> None:
        """Run pieces again until each starts where the one before it ended."""
        heads, tails = self.starts[1:, 0], self.ends[:-1, -1]
        for done in range(_MAX_ROUNDS):
            if (heads != tails).any(axis=1).sum() <= _FEW_WRONG:
                break
            expected = self._expected_starts(done)
            wrong = np.flatnonzero((heads != expected).any(axis=1))
            heads[wrong] = expected[wrong]
            rows = wrong + 1
            self._run(rows, 0)
            for piece in range(1, _PIECES):
                rows = rows[(self.ends[rows, piece - 1] != self.starts[rows, piece]).any(axis=1)]
                self.starts[rows, piece] = self.ends[rows, piece - 1]
                self._run(rows, piece)
        # The last few, in order.
        starts, ends = (counts.reshape(-1, len(self.weights)) for counts in (self.starts, self.ends))
        suspects = np.flatnonzero((starts[1:] != ends[:-1]).any(axis=1)) + 1
        for suspect in suspects.tolist():
            piece = suspect
            while piece < len(starts) and (starts[piece] != ends[piece - 1]).any():
                starts[piece] = ends[piece - 1]
                self._run_plainly(piece)
                piece += 1

    def _guess_counts(self, rare_counts: Array) -> Array:
        """[segments, datasets]: likely counts before each, from the counts of the rare datasets.

        The others share the rest of the draws by weight, rounded down, and what is missing goes to the largest rests.
        """
        common = ~self.rare
        rest = self.first_steps - rare_counts.sum(axis=1)
        shares = rest[:, None] * (self.weights[common] / self.weights[common].sum())
        rounded = np.floor(shares)
        missing = rest - rounded.sum(axis=1)
        # argsort of argsort: the rank of each remainder, the largest remainder first.
        rank = np.argsort(np.argsort(rounded - shares, axis=1, kind="stable"), axis=1)
        counts = np.empty(self.starts[:, 0].shape)
        counts[:, self.rare] = rare_counts
        counts[:, common] = rounded + (rank < missing[:, None])
        return counts

    def _expected_starts(self, rounds: int) -> Array:
        """[segments - 1, datasets]: where segments but the first should start: at the end of the one before it.

        The counts of rare datasets are what they would be if the segments before it had been run again, too: once a
        draw is found, it counts for all later segments. Some of these draws will prove too early. So after two rounds
        the counts are followed from the first segment on, and a segment that started too high adds what it drew.
        """
        expected = self.ends[:-1, -1].copy()
        starts, ends = self.starts[:-1, 0, self.rare], self.ends[:-1, -1, self.rare]
        if rounds < 2:
            counts = np.maximum.accumulate(ends)
        else:
            counts = np.empty_like(ends)
            count = starts[0]
            for k, (start, end) in enumerate(zip(starts, ends, strict=True)):
                known = np.where(count > start, np.maximum(count, end), end)
                count = np.where(count < start, count + (end - start), known)
                counts[k] = count
        expected[:, self.rare] = counts
        # The draws that the rare datasets gained come from somebody; the most frequent one recovers fastest from an
        # error.
        expected[:, np.argmax(self.weights)] -= (counts - ends).sum(axis=1)
        return expected

    def _part(self, piece: int) -> slice:
        return slice(self.bounds[piece], self.bounds[piece + 1])

    def _run(self, rows: Array, piece: int) -> None:
        """One piece of the given segments, side by side."""
        part = self._part(piece)
        if not len(rows) or part.start == part.stop:
            self.ends[rows, piece] = self.starts[rows, piece]
            return
        steps = self.first_steps[rows] + part.start
        drawn = self.starts[rows, piece]
        draws, ranks = _draw_side_by_side(self.weights, steps, part.stop - part.start, drawn, self.limits)
        self.draws[rows, part], self.ranks[rows, part], self.ends[rows, piece] = draws.T, ranks.T, drawn

    def _run_plainly(self, number: int) -> None:
        """A piece by its number among all, in order."""
        row, piece = divmod(number, _PIECES)
        part = self._part(piece)
        first = int(self.first_steps[row])
        self.draws[row, part], self.ranks[row, part], self.ends[row, piece] = _draw_plainly(
            self.weights, first + part.start, first + part.stop, self.starts[row, piece], self.limits
        )


def _draw_side_by_side(
    weights: Array, first_steps: Array, length: int, drawn: Array, limits: Array | None
) -> tuple[Array, Array]:
    """Run the rule from all (step, counts) at once: (draws int16, ranks int64), [length, segments].

    drawn: [segments, datasets], the counts; afterwards those at the end.
    """
    draws = np.empty((length, len(first_steps)), dtype=np.int16)
    ranks = np.empty((length, len(first_steps)), dtype=np.int64)
    datasets = len(weights)
    window = int(np.clip(2 * np.sqrt(datasets), 16, 64))
    level = -np.inf
    for start in range(0, length, window):
        part = slice(start, min(start + window, length))
        out = (draws[part], ranks[part])
        if datasets < _TABLE_ABOVE:
            _follow_rule(weights, first_steps + start, drawn, limits, None, out)
            continue
        furthest_behind = _draw_window(weights, first_steps + start, drawn, limits, level, out)
        level = float(np.quantile(furthest_behind, 0.01)) - 0.01
    return draws, ranks


def _draw_window(
    weights: Array, steps: Array, drawn: Array, limits: Array | None, level: float, out: tuple[Array, Array]
) -> Array:
    """One window of _draw_side_by_side with the datasets that reach `level` in it; `out` is [window, segments] each.

    Returns for each segment how far behind the draw was that was least behind.
    """
    segments, datasets = drawn.shape
    draws, ranks = out
    # A dataset falls further behind with every step, so the last step of the window decides who is in question.
    last_steps = np.maximum(steps + (len(draws) - 1), 1).astype(np.float64)
    in_question = weights * last_steps[:, None] - drawn >= level
    counts = in_question.sum(axis=1)
    width = int(counts.max())
    # The table would save less than filling it costs.
    if width > 0.6 * datasets:
        return _follow_rule(weights, steps, drawn, limits, None, out)
    # Pack them to the left of a table [segments, width], in the order of the datasets as ties go to the first.
    places = np.flatnonzero(in_question)
    rows = np.arange(segments)
    names = places - np.repeat(rows * datasets, counts)
    slots = np.arange(len(places)) + np.repeat(rows * width - (np.cumsum(counts) - counts), counts)
    table_names = np.zeros((segments, width), dtype=np.int16)
    table_weights = np.zeros((segments, width))
    table_drawn = np.full((segments, width), _SPENT)
    table_names.put(slots, names)
    table_weights.put(slots, weights[names])
    table_drawn.put(slots, drawn.take(places))
    table_limits = None
    if limits is not None:
        table_limits = np.full((segments, width), _SPENT)
        table_limits.put(slots, limits[names])
    furthest_behind = _follow_rule(table_weights, steps, table_drawn, table_limits, table_names, out)
    # The margin is far above the rounding of float64.
    wrong = np.flatnonzero(furthest_behind <= level + 1e-6)
    before = drawn[wrong]
    drawn.put(places, table_drawn.take(slots))
    if len(wrong):
        again = (draws[:, wrong], ranks[:, wrong])
        furthest_behind[wrong] = _follow_rule(weights, steps[wrong], before, limits, None, again)
        draws[:, wrong], ranks[:, wrong], drawn[wrong] = *again, before
    return furthest_behind


def _follow_rule(
    weights: Array, steps: Array, drawn: Array, limits: Array | None, names: Array | None, out: tuple[Array, Array]
) -> Array:
    """The rule, on a table of datasets for each segment.

    weights, limits   [segments, width], or [width] for all
    drawn             [segments, width], changed to the counts at the end
    names             int16 [segments, width], the datasets; None: 0, 1, 2, ...
    out               what was drawn and its count before, [steps, segments] each

    Returns for each segment how far behind the draw was that was least behind.
    """
    draws, ranks = out
    segments, width = drawn.shape
    if limits is not None:
        limits = np.broadcast_to(limits, drawn.shape)
        # A count this large puts a dataset so far ahead of its share that it is never the furthest behind.
        drawn[drawn >= limits] = _SPENT
    behind = np.empty_like(drawn)
    first_of_row = np.arange(segments) * width
    least = np.full(segments, np.inf)
    for k in range(len(draws)):
        # Product, then difference, as upstream computes it: a fused operation would round otherwise and break ties
        # otherwise.
        np.multiply(weights, np.maximum(steps + k, 1).astype(np.float64)[:, None], out=behind)
        np.subtract(behind, drawn, out=behind)
        # argmax takes the first of equal ones, which is the rule for ties.
        best = behind.argmax(axis=1)
        if names is None:
            draws[k] = best
        best += first_of_row
        if names is not None:
            draws[k] = names.take(best)
        np.minimum(least, behind.take(best), out=least)
        count = drawn.take(best)
        ranks[k] = count
        count += 1
        if limits is not None:
            count[count >= limits.take(best)] = _SPENT
        drawn.put(best, count)
    if limits is not None:
        np.minimum(drawn, limits, out=drawn)
    return least


def _draw_plainly(
    weights: Array, first_step: int, end_step: int, counts: Array, limits: Array | None
) -> tuple[Array, Array, Array]:
    """The rule as a loop over the steps [first_step, end_step): (draws int16, ranks int64, counts after them)."""
    draws = np.zeros(end_step - first_step, dtype=np.int16)
    ranks = np.zeros(end_step - first_step, dtype=np.int64)
    share, drawn = weights.tolist(), counts.tolist()
    unspent = [d for d in range(len(share)) if limits is None or drawn[d] < limits[d]]
    for s in range(first_step, end_step):
        if not unspent:
            break  # the last segment reaches beyond the end
        step = float(max(s, 1))
        best, most_behind = unspent[0], share[unspent[0]] * step - drawn[unspent[0]]
        for d in unspent:
            behind = share[d] * step - drawn[d]
            # Strictly: among equals the first dataset is drawn.
            if behind > most_behind:
                best, most_behind = d, behind
        draws[s - first_step], ranks[s - first_step] = best, drawn[best]
        drawn[best] += 1
        if limits is not None and drawn[best] == limits[best]:
            unspent.remove(best)
    return draws, ranks, np.asarray(drawn, dtype=np.float64)

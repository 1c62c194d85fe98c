# SPDX-License-Identifier: Apache-2.0
"""DiLoCo: local steps at each site, and an outer step on what the sites have learnt (Douillard et al., 2023; streaming:
Douillard et al., 2025).

Of each fragment of the weights a site keeps the values at the last outer step (`outer_weight`) and the outer momentum.
When a fragment is due, every site sends outer_weight - weight, and the mean d over the sites updates both:

    momentum     <- mu momentum + d
    outer_weight <- outer_weight - eta (d + mu momentum)
    weight       <- alpha weight + (1 - alpha) outer_weight

The exchange may go on beside the next tau steps; its result is then applied to the weights of that time. The first site
decides which sites take part in an outer step and sends the mean; all sites make the same update from the same bytes. A
site that has missed one is given the outer state at its next exchange. A first site that comes back from an old
checkpoint is given it by another one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.collectives import all_reduce, broadcast, broadcast_object
from megatron.core.many_sites.exchange import SiteExchange
from megatron.core.many_sites.formats import LOSSY, count_bytes, decode, encode
from megatron.core.many_sites.link import Message
from megatron.core.many_sites.pending import Pending, Position
from megatron.core.many_sites.shares import (
    MEAN,
    MOMENTUM,
    RESIDUAL,
    WEIGHT,
    OwnedSlice,
    Share,
    divide,
    name_outer_state,
)
from megatron.core.optimizer.megatron_optimizer import MegatronOptimizer
from megatron.core.process_groups_config import Group

_OUTCOMES = ("lost", "none", "mean", "state", "give")
"""Kinds of the first site's answer: none in time; no outer step; its mean; the outer state, for a site that is behind;
the wish for that state, from a site that is ahead."""
_TAKEN_BACK = -1
"""Version of a message that takes back the one before it."""


@dataclass(frozen=True)
class OuterSettings:
    """Settings of the exchange: --diloco-inner-steps and the others of that prefix."""

    sites: int
    inner_steps: int
    fragments: int
    overlap_steps: int
    outer_lr: float
    outer_momentum: float
    mixing: float
    form: str
    min_replicas: int
    timeout_seconds: float


class OuterOptimizer:
    """The outer steps of this process's part of the model.

    exchange: with the equal ranks of the other sites; None where another rank of the site has the same weights and
    exchanges them. leads: this is the first site. All ranks of a site call everything together.
    """

    def __init__(
        self, optimizer: MegatronOptimizer, settings: OuterSettings, exchange: SiteExchange | None, *, leads: bool
    ) -> None:
        self.optimizer, self.settings, self.exchange, self.leads = optimizer, settings, exchange, leads
        self.world: Group = optimizer.groups.world
        self.version = 0
        """Outer steps so far."""
        self.waited_seconds = 0.0
        """Time for which training stood still for other sites so far."""
        self._pending: list[Pending] = []
        self._late: set[int] = set()
        self._behind: dict[int, str] = {}
        """Sites that wait for the outer state, and the topic about which they asked."""
        self._answered: dict[tuple[int, str], list[Any]] = {}
        """By site and topic, the last exchange for which it was answered, or will be in a moment."""
        self._fragments = divide(optimizer, settings.fragments, settings.form)
        for state in optimizer.states:
            state.add_companions(name_outer_state(settings.form, settings.overlap_steps))
        self.restart()

    # ---- the run

    def meet(self, say: Callable[[str], None]) -> None:
        """Wait for the other sites before the first step, and go on without those that do not come in time; every rank
        calls this. Raises ConfigError on a site that the first one does not take."""
        if self.exchange is not None:
            missing = set(range(1, self.settings.sites)) if self.leads else {0}
            self.exchange.meet(missing, self.settings.timeout_seconds, say)

    def restart(self) -> None:
        """Begin with the weights as they are, which all sites have alike."""
        self._each_piece(lambda piece: piece.companion(WEIGHT).copy_(piece.values))

    @torch.no_grad()
    def after_step(self, now: Position) -> Position | None:
        """Exchange what is due after an iteration. Returns the run's new position where another site was further on."""
        moved, settings = None, self.settings
        for pending in list(self._pending):
            if now.iteration >= pending.began.iteration + settings.overlap_steps:
                moved = self._finish(pending, now) or moved
            elif self.leads:
                self._lead(pending, waits=False)
        for fragment in range(settings.fragments):
            offset = fragment * settings.inner_steps // settings.fragments
            if (now.iteration + offset) % settings.inner_steps == 0:
                pending = self._begin(fragment, now)
                if settings.overlap_steps == 0:
                    moved = self._finish(pending, now) or moved
        return moved

    @torch.no_grad()
    def settle(self) -> None:
        """Wait for the results of exchanges under way and keep them where a checkpoint finds them, unapplied."""
        for pending in self._pending:
            self._receive(pending)
            for share, mean in zip(self._fragments[pending.fragment], pending.means, strict=False):
                share.scatter(mean, lambda piece, part: piece.companion(MEAN).copy_(part))

    def state_dict(self) -> dict[str, Any]:
        """Return what is no tensor; `settle` before."""
        pending = [[p.fragment, *p.began] for p in self._pending if p.means]
        return {"version": self.version, "pending": pending}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse, once the tensors are loaded."""
        self.version, self._pending = state["version"], []
        for fragment, *began in state["pending"]:
            means = [share.gather(lambda piece: piece.companion(MEAN)) for share in self._fragments[fragment]]
            self._pending.append(Pending(fragment, Position(*began), 0.0, [], [], means, is_over=True))

    def average(self, about: str, values: Sequence[float]) -> list[float]:
        """Mean of some numbers over the sites that are there in time. Every rank of a site gets the same."""
        found = list(values)
        if self.world.rank() == 0 and self.exchange is not None:
            began_at = time.monotonic()
            found = self._average(self.exchange, about, found, began_at + self.settings.timeout_seconds)
            self.waited_seconds += time.monotonic() - began_at
        return found if self.world.size() == 1 else broadcast_object(found, self.world, 0)

    def close(self, *, is_done: bool = True) -> None:
        """End the connections. is_done: the run is over, and the others need not expect this site again."""
        if self.exchange is not None:
            self.exchange.close(is_done=is_done)

    # ---- one exchange

    def _begin(self, fragment: int, now: Position) -> Pending:
        pending = Pending(fragment, now, time.monotonic(), [])
        payload = b""
        for share in self._fragments[fragment]:
            delta = share.gather(lambda piece: piece.companion(WEIGHT) - piece.values)
            lost = torch.zeros(0)
            if share.is_exchanged:
                if self.settings.form in LOSSY:
                    delta += share.gather(lambda piece: piece.companion(RESIDUAL))
                encoded = encode(delta, self.settings.form)
                kept = decode(encoded, share.numel, self.settings.form)
                payload, lost, delta = payload + encoded, delta - kept, kept
            pending.deltas.append(delta)
            pending.lost.append(lost)
        self._pending.append(pending)
        if self.exchange is not None and not self.leads:
            # An answer that came too late for an earlier exchange is none to this one.
            self.exchange.take(0, "answer", pending.topic)
            self.exchange.send(0, "delta", pending.topic, payload, version=self.version, place=now)
        return pending

    def _finish(self, pending: Pending, now: Position) -> Position | None:
        """Wait for the means and make the outer step."""
        theirs = self._receive(pending)
        self._pending = [other for other in self._pending if other is not pending]
        if pending.means:
            self._update(pending)
        if self._behind and not any(other.means for other in self._pending):
            self._give_state(now)
        if theirs is None or theirs.iteration <= pending.began.iteration:
            return None
        # As far on from there as this site has come since the exchange began.
        went = (since - began for since, began in zip(now, pending.began, strict=True))
        return Position(*(their + steps for their, steps in zip(theirs, went, strict=True)))

    def _receive(self, pending: Pending) -> Position | None:
        """Wait until the means are known, or it is known that there are none; returns the place of the site that is
        furthest on."""
        if pending.is_over:
            return None
        began_at = time.monotonic()
        theirs = self._lead(pending, waits=True) if self.leads else self._follow(pending)
        self.waited_seconds += time.monotonic() - began_at
        return theirs

    def _update(self, pending: Pending) -> None:
        eta, mu, alpha = self.settings.outer_lr, self.settings.outer_momentum, self.settings.mixing

        def step(piece: OwnedSlice, part: Tensor) -> None:
            outer, momentum = piece.companion(WEIGHT), piece.companion(MOMENTUM)
            momentum.mul_(mu).add_(part)
            outer.sub_(part.add(momentum, alpha=mu), alpha=eta)
            values = piece.values
            values.copy_(outer if alpha == 0 else alpha * values + (1 - alpha) * outer)

        for share, mean in zip(self._fragments[pending.fragment], pending.means, strict=True):
            share.scatter(mean, step)
        self.optimizer.take_changed_weights()

    def _keep_lost(self, pending: Pending) -> None:
        """Keep what was rounded away for the fragment's next exchange, now that this one counts."""
        if self.settings.form in LOSSY:
            for share, lost in zip(self._fragments[pending.fragment], pending.lost, strict=True):
                if share.is_exchanged:
                    share.scatter(lost, lambda piece, part: piece.companion(RESIDUAL).copy_(part))

    # ---- the first site

    def _lead(self, pending: Pending, *, waits: bool) -> Position | None:
        """Take what the other sites have sent, and answer them; without `waits` only when all of it is there."""
        if pending.is_over:
            return None
        exchange, topic, deadline = self.exchange, pending.topic, self._deadline(pending)
        others = range(1, self.settings.sites)
        messages: dict[int, Message] = {}
        is_complete = True
        if exchange is not None:
            is_complete = self._hear(exchange, "delta", topic, deadline if waits else 0.0)
            # Looked at once: a site that gives up meanwhile takes its message back.
            found = {site: exchange.peek(site, "delta", topic) for site in others}
            messages = {site: message for site, message in found.items() if message is not None and stands(message)}
        # A process that exchanges nothing has nothing against anybody.
        heard = [exchange is None or site in messages for site in others]
        flags = torch.tensor([is_complete, *heard], dtype=torch.int32)
        all_reduce(flags, self.world, op="min")
        if not waits and not flags[0]:
            return None
        pending.is_over = True
        present = [site for site in others if flags[site]]
        messages = {site: message for site, message in messages.items() if site in present}
        verdict = {}
        for site, message in messages.items():
            assert exchange is not None
            exchange.take(site, "delta", topic)
            exchange.take(site, "standing", topic)
            self._answered[site, topic] = message.fields["place"]
            verdict[site] = message.fields["version"], Position(*message.fields["place"])
        verdict = verdict if self.world.size() == 1 else broadcast_object(verdict, self.world, 0)
        ahead = max(verdict, key=lambda site: verdict[site][0], default=None)
        if ahead is not None and verdict[ahead][0] > self.version:
            return self._take_state_from(ahead, topic, verdict, deadline)
        self._behind |= {site: topic for site, (version, _) in verdict.items() if version < self.version}
        members = [site for site, (version, _) in verdict.items() if version == self.version]
        furthest = max([pending.began, *(verdict[site][1] for site in members)])
        if 1 + len(members) < self.settings.min_replicas:
            self._tell(members, "none", topic)
            return furthest
        # In the order of the sites, so that sums have one order.
        payloads = [messages[site].payload for site in sorted(members) if exchange is not None]
        answer = self._average_deltas(pending, payloads, 1 + len(members))
        self.version += 1
        self._tell(members, "mean", topic, answer, place=furthest)
        return furthest

    def _average_deltas(self, pending: Pending, payloads: Sequence[bytes], count: int) -> bytes:
        """Fill in the means of all shares over `count` sites, and return those that this process has exchanged, for the
        others."""
        form, answer, first = self.settings.form, b"", 0
        for number, share in enumerate(self._fragments[pending.fragment]):
            mean = pending.deltas[number]
            if share.is_exchanged:
                size = count_bytes(share.numel, form)
                total = mean.clone()
                for payload in payloads:
                    total += decode(payload[first : first + size], share.numel, form)
                first += size
                exact = total / count
                encoded = encode(exact, form)
                mean = decode(encoded, share.numel, form)
                # What the answer loses is made up for by this site, whose part in the next mean is 1 / count.
                pending.lost[number] += count * (exact - mean)
                answer += encoded
            pending.means.append(self._share_out(share, mean))
        self._keep_lost(pending)
        return answer

    def _take_state_from(self, ahead: int, topic: str, verdict: dict[int, Any], deadline: float) -> Position | None:
        """This site has come back from an older checkpoint: take the outer state from one that is further on."""
        self._tell([site for site in verdict if site != ahead], "none", topic)
        self._tell([ahead], "give", topic)
        exchange = self.exchange
        if exchange is not None:
            exchange.wait_until(
                lambda: exchange.peek(ahead, "state", "") is not None or ahead not in exchange.connected, deadline
            )
        version, place = verdict[ahead]
        message = None if exchange is None else exchange.take(ahead, "state", "")
        return place if self._load(message.payload if message else None, version) else None

    def _hear(self, exchange: SiteExchange, kind: str, topic: str, deadline: float) -> bool:
        """Wait for a message from each site that is expected, and return whether all have come. Those that have not are
        no longer waited for, until they are heard of again."""
        has = self._has_delta if kind == "delta" else self._has_values

        def list_missing() -> set[int]:
            expected = exchange.connected  # a lost site is not waited for
            if kind == "delta" and deadline > 0.0:
                # A site in step waits for this answer, too: values are of one that is elsewhere, and waits there.
                for site in expected:
                    self._return_values(exchange, site)
            return {site for site in expected - self._late if not has(exchange, site, topic)}

        self._late -= {site for site in self._late if has(exchange, site, topic)}
        is_complete = exchange.wait_until(lambda: not list_missing(), deadline)
        if deadline > 0.0:
            self._late |= list_missing()
        return is_complete

    @staticmethod
    def _has_delta(exchange: SiteExchange, site: int, topic: str) -> bool:
        message = exchange.peek(site, "delta", topic)
        return message is not None and stands(message)

    def _has_values(self, exchange: SiteExchange, site: int, about: str) -> bool:
        # Whatever they are about: a site that is elsewhere will not come here before it has been answered. The same
        # holds for one that stands at an exchange.
        if exchange.peek(site, "values", "") is not None:
            return True
        standing = {topic: exchange.peek(site, "standing", topic) for topic in map(str, range(self.settings.fragments))}
        return any(m is not None and m.fields["at"] != self._answered.get((site, t)) for t, m in standing.items())

    @staticmethod
    def _return_values(exchange: SiteExchange, site: int) -> None:
        """Let a site that is elsewhere go on with its values."""
        message = exchange.take(site, "values", "")
        if message is not None:
            fields = message.fields
            exchange.send(site, "means", "", urgent=True, about=fields["about"], values=fields["values"])

    def _tell(self, sites: Sequence[int], outcome: str, topic: str, payload: bytes = b"", **fields: Any) -> None:
        fields |= {"outcome": outcome, "version": self.version}
        for site in sites if self.exchange is not None else ():
            self.exchange.send(site, "answer", topic, payload, **fields)  # type: ignore[union-attr]

    def _give_state(self, now: Position) -> None:
        state = self._dump()
        for site, topic in self._behind.items():
            self._tell([site], "state", topic, state, place=now)
        self._behind = {}

    # ---- the other sites

    def _follow(self, pending: Pending) -> Position | None:
        """Wait for the first site's answer."""
        pending.is_over = True
        exchange, message = self.exchange, None
        code, neutral = 0, exchange is None
        if exchange is not None:
            exchange.send(0, "standing", pending.topic, urgent=True, at=pending.began)
            exchange.wait_until(
                lambda: exchange.peek(0, "answer", pending.topic) is not None or 0 not in exchange.connected,
                self._deadline(pending),
            )
            message = exchange.take(0, "answer", pending.topic)
            code = 0 if message is None else _OUTCOMES.index(message.fields["outcome"])
        # All ranks of the site must have had the same answer; else they do without, and are told the state next time.
        codes = torch.tensor([len(_OUTCOMES), len(_OUTCOMES)] if neutral else [code, -code], dtype=torch.int32)
        all_reduce(codes, self.world, op="min")
        fields = None if message is None else dict(message.fields)
        fields = fields if self.world.size() == 1 else broadcast_object(fields, self.world, 0)
        outcome = _OUTCOMES[int(codes[0])] if int(codes[0]) == -int(codes[1]) else _OUTCOMES[0]
        if outcome == "lost":
            if exchange is not None:  # whatever comes of it now, this site has gone on
                exchange.send(0, "delta", pending.topic, version=_TAKEN_BACK, place=pending.began)
            return None
        assert fields is not None
        if outcome == "give" and exchange is not None:
            exchange.send(0, "state", "", self._dump())
        payload = b"" if message is None else message.payload
        if outcome == "mean":
            first = 0
            for number, share in enumerate(self._fragments[pending.fragment]):
                mean = pending.deltas[number]
                if share.is_exchanged:
                    size = count_bytes(share.numel, self.settings.form)
                    mean, first = decode(payload[first : first + size], share.numel, self.settings.form), first + size
                pending.means.append(self._share_out(share, mean))
            self._keep_lost(pending)
            self.version = fields["version"]
            return Position(*fields["place"])
        if outcome == "state" and self._load(payload, fields["version"]):
            return Position(*fields["place"])
        return None

    def _average(self, exchange: SiteExchange, about: str, values: list[float], deadline: float) -> list[float]:
        if self.leads:
            self._hear(exchange, "values", about, deadline)
            rows, there = [values], []
            for site in range(1, self.settings.sites):
                message = exchange.peek(site, "values", "")
                if message is None:
                    continue
                theirs = message.fields["values"]
                if message.fields["about"] == about and len(theirs) == len(values):
                    exchange.take(site, "values", "")
                    rows.append(theirs)
                    there.append(site)
                else:
                    self._return_values(exchange, site)
            means = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
            for site in there:
                exchange.send(site, "means", "", urgent=True, about=about, values=means)
            return means
        exchange.send(0, "values", "", urgent=True, about=about, values=values)

        def is_answered() -> bool:
            message = exchange.peek(0, "means", "")
            return message is not None and message.fields["about"] == about

        exchange.wait_until(lambda: is_answered() or 0 not in exchange.connected, deadline)
        message = exchange.take(0, "means", "") if is_answered() else None
        return values if message is None else list(message.fields["values"])

    # ---- state, and what both need

    def _deadline(self, pending: Pending) -> float:
        return pending.began_at + self.settings.timeout_seconds

    def _share_out(self, share: Share, mean: Tensor) -> Tensor:
        """The mean on all processes that have copies of these weights."""
        if share.copies.size() > 1:
            moved = mean.to(self.optimizer.device)
            broadcast(moved, share.copies)
            mean = moved.cpu()
        return mean

    def _dump(self) -> bytes:
        """The outer state of what this process exchanges."""
        return b"".join(
            encode(share.gather(lambda piece, kind=kind: piece.companion(kind)), "fp32")  # type: ignore[misc]
            for share in self._exchanged()
            for kind in (WEIGHT, MOMENTUM)
        )

    def _load(self, content: bytes | None, version: int) -> bool:
        """Take another site's outer state, if it has come to all ranks of this one."""
        sizes = [count_bytes(share.numel, "fp32") for share in self._exchanged()]
        is_here = self.exchange is None or (content is not None and len(content) == 2 * sum(sizes))
        flag = torch.tensor([is_here], dtype=torch.int32)
        all_reduce(flag, self.world, op="min")
        if not flag.item():
            return False
        first = 0
        for share in (share for shares in self._fragments for share in shares):
            for kind in (WEIGHT, MOMENTUM):
                flat = torch.zeros(share.numel)
                if share.is_exchanged and content is not None:
                    size = count_bytes(share.numel, "fp32")
                    flat, first = decode(content[first : first + size], share.numel, "fp32"), first + size
                flat = self._share_out(share, flat)
                share.scatter(flat, lambda piece, part, kind=kind: piece.companion(kind).copy_(part))  # type: ignore[misc]
        self._each_piece(lambda piece: piece.values.copy_(piece.companion(WEIGHT)))
        if self.settings.form in LOSSY:
            self._each_piece(lambda piece: piece.companion(RESIDUAL).zero_())
        self.optimizer.take_changed_weights()
        self.version, self._pending = version, []
        return True

    def _exchanged(self) -> list[Share]:
        return [share for shares in self._fragments for share in shares if share.is_exchanged]

    @torch.no_grad()
    def _each_piece(self, action: Callable[[OwnedSlice], Any]) -> None:
        for share in (share for shares in self._fragments for share in shares):
            for piece in share.pieces:
                action(piece)


def stands(message: Message) -> bool:
    """Return whether a site's part in an exchange has not been taken back."""
    return bool(message.fields["version"] != _TAKEN_BACK)

# SPDX-License-Identifier: Apache-2.0
"""Number formats of an exchange, and connections that accept nothing from strangers."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.errors import ConfigError
from megatron.core.many_sites.exchange import SiteExchange
from megatron.core.many_sites.formats import BLOCK, count_bytes, count_padded, decode, encode
from megatron.core.many_sites.link import LinkError, Message, SiteLink
from megatron.training.config.sites import SitesConfig
from megatron.training.launch.sites import read_key
from tests.support.run_flags import run_config

KEY = b"a key of sixteen bytes or more"


@pytest.mark.parametrize(("form", "worst"), [("fp32", 0.0), ("bf16", 2.0**-8), ("int8", 1 / 250), ("e3m0", 0.5)])
def test_a_vector_comes_back_within_the_rounding_of_its_format(form: str, worst: float) -> None:
    generator = torch.Generator().manual_seed(1)
    numel = count_padded(700, form)
    assert numel == (700 if form in ("fp32", "bf16") else 3 * BLOCK)
    flat = torch.randn(numel, generator=generator) * torch.logspace(-6, 2, numel)
    flat[5], flat[-BLOCK:] = 0.0, 0.0
    encoded = encode(flat, form)
    assert len(encoded) == count_bytes(numel, form)
    back = decode(encoded, numel, form)
    if form == "int8":  # of the largest of its block
        bound = worst * torch.cat([part.abs().max().expand(len(part)) for part in flat.split(BLOCK)])
    elif form == "e3m0":  # of the element, or the smallest power that there is
        largest = torch.cat([part.abs().max().expand(len(part)) for part in flat.split(BLOCK)])
        bound = torch.maximum(worst * flat.abs(), largest * 2.0**-6)
    else:
        bound = worst * flat.abs()
    assert ((back - flat).abs() <= bound).all() and back[5] == 0 and (back[-BLOCK:] == 0).all()
    torch.testing.assert_close(decode(encode(back, form), numel, form), back, rtol=1e-6, atol=0)
    with pytest.raises(ValueError, match="bytes are not"):
        decode(encoded[:-1], numel, form)


def connect(caller_key: bytes = KEY, answerer_key: bytes = KEY) -> list[Any]:
    """Both ends of a link, or what kept them from it."""
    ends: list[Any] = [None, None]

    def open_end(number: int, connection: socket.socket, key: bytes) -> None:
        try:
            ends[number] = SiteLink(connection, key, is_caller=number == 0, most=10_000_000)
        except LinkError as error:
            ends[number] = error
            connection.close()

    pair = socket.socketpair()
    threads = [
        threading.Thread(target=open_end, args=(number, connection, key))
        for number, (connection, key) in enumerate(zip(pair, (caller_key, answerer_key), strict=True))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return ends


def test_short_messages_pass_long_ones_and_all_arrive_whole() -> None:
    caller, answerer = connect()
    got: list[Message] = []
    payload = bytes(range(256)) * 20_000
    caller.send(Message("long", {"n": 1}, payload))
    caller.send(Message("short", {"x": 0.1}), urgent=True)
    answerer.start(got.append, lambda: None)
    caller.start(lambda message: None, lambda: None)
    deadline = time.monotonic() + 20
    while len(got) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [message.kind for message in got] == ["short", "long"]
    assert got[1].payload == payload and got[0].fields == {"x": 0.1}
    caller.close()
    answerer.close()


def test_another_key_is_turned_away() -> None:
    ends = connect(KEY, KEY + b"!")
    assert any(isinstance(end, LinkError) and "another key" in str(end) for end in ends)
    assert not any(isinstance(end, SiteLink) and end.bytes_sent for end in ends)


@pytest.mark.parametrize("change", ["content", "repeat"])
def test_a_frame_that_somebody_changed_or_sent_again_ends_the_connection(change: str) -> None:
    near, middle_a = socket.socketpair()
    middle_b, far = socket.socketpair()
    got: list[Message] = []
    lost = threading.Event()
    seen: list[bytes] = []

    def relay(source: socket.socket, target: socket.socket, spoils: bool) -> None:
        handshake = 16 + 32 + 32
        while data := source.recv(65536):
            if spoils and sum(map(len, seen)) >= handshake:
                data = data[:-1] + bytes([data[-1] ^ 1]) if change == "content" else data + data
            if spoils:
                seen.append(data)
            target.sendall(data)

    for ends, spoils in (((middle_a, middle_b), True), ((middle_b, middle_a), False)):
        threading.Thread(target=relay, args=(*ends, spoils), daemon=True).start()
    links: list[SiteLink] = []
    opener = threading.Thread(target=lambda: links.append(SiteLink(far, KEY, is_caller=False, most=1000)))
    opener.start()
    caller = SiteLink(near, KEY, is_caller=True, most=1000)
    opener.join(20)
    links[0].start(got.append, lost.set)
    caller.start(lambda message: None, lambda: None)
    caller.send(Message("delta", {}, b"1234"))
    assert lost.wait(20)
    assert len(got) == (0 if change == "content" else 1)
    for end in (near, middle_a, middle_b, far):
        end.close()


def test_a_site_with_other_settings_is_turned_away() -> None:
    first, other = (SiteExchange(n, 2, KEY, most=1000, settings=text) for n, text in ((0, "a"), (1, "b")))
    other.call("127.0.0.1", first.listen("127.0.0.1", 0))
    assert first.wait_until(lambda: first.problem is not None, time.monotonic() + 20)
    assert "another model, or other --diloco- flags" in str(first.problem) and first.connected == set()
    for exchange in (first, other):
        exchange.close(is_done=True)


FEW = "--diloco-replicas 2 "


@pytest.mark.flags("--datacenter-id", "--diloco-address", "--diloco-key-file")
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (FEW + "--diloco-inner-steps 7 --diloco-fragments 2", "--diloco-inner-steps 7 is not divisible by"),
        (FEW + "--diloco-inner-steps 6 --diloco-fragments 2 --diloco-overlap-steps 3", "is not less than 3"),
        (FEW + "--diloco-min-replicas 3", "--diloco-min-replicas 3 is more than --diloco-replicas 2"),
        (FEW + "--datacenter-id 2", "--datacenter-id 2 is none of the 2 sites"),
        (FEW + "--datacenter-id 1", "--datacenter-id needs --diloco-address"),
        (FEW + "--datacenter-id 1 --diloco-key-file k --diloco-address host", "is not HOST:PORT"),
        (
            FEW + "--datacenter-id 1 --diloco-key-file k --diloco-address a:1,b:1,c:1",
            "names 3 nodes, which do not divide",
        ),
        (FEW + "--diloco-timeout-seconds 600", "is not less than --distributed-timeout-minutes 10"),
        (FEW + "--dry-run", "--dry-run tries one job, and --diloco-replicas 2 makes a job of each site"),
        ("--diloco-replicas 3", "--diloco-replicas 3 does not divide the 4 processes into equal sites; use 2 or 4"),
        (FEW + "--tensor-model-parallel-size 4", "2"),
        (FEW + "--use-torch-fsdp2", "--diloco-replicas 2 cannot be combined with --use-torch-fsdp2"),
        (FEW + "--diloco-exchange-dtype int8 --pipeline-model-parallel-size 2", "would round the copies"),
        (FEW + "--diloco-mixing 1.5", "--diloco-mixing"),
        (FEW + "--diloco-exchange-dtype fp4", "--diloco-exchange-dtype"),
    ],
)
def test_what_cannot_be_is_a_sentence(flags: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        run_config(flags, world_size=4)
    assert sentence in str(error.value)


def test_a_key_that_cannot_be_used_is_a_sentence(tmp_path: Path) -> None:
    short = tmp_path / "key"
    short.write_bytes(b"short\n")
    for path, sentence in ((short, "holds 5 bytes, fewer than 16"), (tmp_path / "none", "cannot be read")):
        with pytest.raises(ConfigError, match=sentence):
            read_key(SitesConfig(diloco_key_file=str(path)))

# SPDX-License-Identifier: Apache-2.0
"""The server on a port: OpenAI's own client, and connections that are slow, half closed or never finished."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from megatron.cli.serve import open_socket, start_server
from megatron.core.inference.engine import Engine
from megatron.serving.app import Application, Limits
from tests.support.served_model import open_server


class Server(NamedTuple):
    """A server on a port, and what stands behind it."""

    port: int
    application: Application
    engine: Engine


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with open_server(Limits(api_keys=("secret",))) as (_, application):
        listening = open_socket("127.0.0.1", 0)
        running, thread = start_server(application, listening)
        engine = application.service.engine
        assert engine is not None
        yield Server(listening.getsockname()[1], application, engine)
        running.should_exit = True
        thread.join(timeout=60)
        listening.close()


def wait_until_nothing_is_held(server: Server) -> None:
    for _ in range(600):
        if not server.engine.has_work and not server.application.service.num_jobs:
            break
        time.sleep(0.05)
    assert [pool.num_used for pool in server.engine.state.pools] == [0]
    assert server.application.service.num_jobs == 0


def test_openais_client(server: Server) -> None:
    openai = pytest.importorskip("openai")
    address = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(base_url=address, api_key="secret", max_retries=0, timeout=60) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        whole = client.completions.create(model="tiny", prompt="abc", max_tokens=9, temperature=0, logprobs=2)
        assert whole.usage is not None and whole.usage.prompt_tokens == 3 and whole.choices[0].finish_reason
        assert len(whole.choices[0].logprobs.token_logprobs) == whole.usage.completion_tokens
        parts = client.completions.create(model="tiny", prompt="abc", max_tokens=9, temperature=0, stream=True)
        assert "".join(part.choices[0].text for part in parts if part.choices) == whole.choices[0].text
        messages = [{"role": "user", "content": "hello"}]
        chat = client.chat.completions.create(model="tiny", messages=messages, max_tokens=5, temperature=0)
        assert chat.choices[0].message.role == "assistant"
        stream = client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=5, temperature=0, stream=True
        )
        pieces = [part.choices[0].delta.content or "" for part in stream if part.choices]
        assert "".join(pieces) == chat.choices[0].message.content
        with pytest.raises(openai.BadRequestError, match="temperature") as refused:
            client.completions.create(model="tiny", prompt="abc", temperature=-1)
        assert refused.value.param == "temperature"
        with pytest.raises(openai.NotFoundError, match="nobody"):
            client.completions.create(model="nobody", prompt="abc")
    stranger = openai.OpenAI(base_url=address, api_key="wrong", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    wait_until_nothing_is_held(server)


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def write_request(body: str, length: int | None = None) -> bytes:
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {length or len(body)}\r\n\r\n{body}".encode()


def test_slow_and_half_closed_connections_hold_nothing(server: Server) -> None:
    """Heads and bodies that never end, clients that read nothing, that say no more, and that are gone."""
    endless = '{"prompt": "a", "max_tokens": 150, "ignore_eos": true, "stream": true}'
    whole = endless.replace("true}", "false}")
    slow = [connect(server) for _ in range(6)]
    try:
        slow[0].sendall(b"POST /v1/completions HTTP/1.1\r\nHost: loc")
        slow[1].sendall(write_request(endless[:20], len(endless)))
        slow[2].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        slow[2].sendall(write_request(endless))
        slow[3].sendall(write_request(endless))
        slow[3].shutdown(socket.SHUT_WR)
        slow[4].sendall(write_request(whole))
        slow[4].shutdown(socket.SHUT_WR)
        slow[5].sendall(write_request(whole))
        slow[5].close()
        with connect(server) as other:  # others are served meanwhile
            other.sendall(write_request('{"prompt": "b", "max_tokens": 3}'))
            assert other.recv(100).startswith(b"HTTP/1.1 200")
        wait_until_nothing_is_held(server)
    finally:
        for connection in slow:
            connection.close()

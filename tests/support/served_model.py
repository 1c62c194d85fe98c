# SPDX-License-Identifier: Apache-2.0
"""A tiny model of bytes behind the server's application, without a port: for tests of what it answers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from starlette.testclient import TestClient

from megatron.core.inference.engine import Engine, EngineSettings
from megatron.core.tokenizers.base import Tokenizer
from megatron.serving.answers import ServedModel
from megatron.serving.app import Application, Limits
from megatron.serving.service import Service
from megatron.training.recipes.gpt import build_gpt_model
from tests.support.gpt_models import read_config

LONGEST = 160
FLAGS = f"--position-embedding-type rope --max-position-embeddings {LONGEST} --init-method-std 0.2"

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)


class ByteTokenizer(Tokenizer):
    """A token for each byte; 0 ends a text."""

    chat_template = TEMPLATE
    vocab_size, eod, pad = 256, 0, 0
    unique_identifiers = {"class": "ByteTokenizer"}  # noqa: RUF012 (a property of the base)

    def tokenize(self, text: str) -> list[int]:
        """Its bytes."""
        return list(text.encode())

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of bytes, what is none replaced."""
        return bytes(ids).decode(errors="replace")


@contextlib.contextmanager
def open_server(limits: Limits | None = None, **settings: Any) -> Iterator[tuple[TestClient, Application]]:
    """A client and the application that it asks, whose engine works in a thread."""
    model = build_gpt_model(read_config(FLAGS), 256).eval()
    settings = {"capacity_tokens": 640, "max_step_tokens": 64} | settings
    engine = Engine(model, EngineSettings(LONGEST, **settings), vocab_size=256)
    service = Service(settings.pop("max_waiting", 64))
    application = Application(service, limits or Limits())
    application.served = ServedModel("tiny", ByteTokenizer(), LONGEST, 256, (0,))
    worker = threading.Thread(target=service.run, args=(engine,))
    worker.start()
    try:
        with TestClient(application.build()) as client:
            while service.state == "loading":
                pass
            yield client, application
    finally:
        service.drain(0)
        worker.join()

# SPDX-License-Identifier: Apache-2.0
"""Bodies of requests, right and wrong, each a function of its seed.

python -m tests.unit.serving.bad_bodies 2000      sends so many to a server in this process
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

_ODD: list[Any] = [
    1e-320, None, True, False, -1, 0, 1, 2, 10**6, 10**30, -(2**63) - 1, 0.5, -0.0, 1e308, float("nan"), float("inf"),
    "", "a", "\ud800", "\x00", "é" * 50, "x" * 500, [], [None], [[]], [[1, 2], ["a"]], ["x"] * 300, list(range(40)), {},
    {"a": {"b": []}}, {"1": 1.0}, {"include_usage": True},
]  # fmt: skip
_FIELDS = [
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "stop", "stop_token_ids", "min_tokens", "ignore_eos",
    "seed", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "stream", "stream_options",
    "streaming_interval", "echo", "logprobs", "prompt_logprobs", "model", "suffix", "tools", "user", "top_logprobs",
    "chat_template_kwargs", "max_completion_tokens",
]  # fmt: skip
_USUAL = {
    "max_tokens": 3,
    "temperature": 0.7,
    "top_p": 0.9,
    "n": 2,
    "stop": "e",
    "seed": 3,
    "logprobs": 1,
    "echo": True,
}


def draw_body(rng: random.Random) -> tuple[str, bytes]:
    """An address, and what is posted to it."""
    is_chat = rng.random() < 0.4
    address = "/v1/chat/completions" if is_chat else "/v1/completions"
    body: dict[str, Any] = {"max_tokens": rng.randrange(4)}
    if is_chat:
        body["messages"] = rng.choice([[{"role": "user", "content": "hi"}], rng.choice(_ODD), [rng.choice(_ODD)]])
    else:
        body["prompt"] = rng.choice(["abc", ["a", "b"], [97, 98], [[97], [98, 99]], rng.choice(_ODD)])
    for _ in range(rng.randrange(4)):
        name = rng.choice(_FIELDS)
        body[name] = _USUAL[name] if name in _USUAL and rng.random() < 0.5 else rng.choice(_ODD)
    content = json.dumps(body).encode()
    if rng.random() < 0.1:
        place = rng.randrange(len(content))
        content = content[:place] + bytes([rng.randrange(256)]) + content[place + rng.randrange(2) :]
    return address, content


def main() -> int:
    """Send bodies, and say how they were answered."""
    from collections import Counter

    from tests.support.served_model import open_server

    statuses: Counter[int] = Counter()
    with open_server() as (client, application):
        for seed in range(int(sys.argv[1])):
            address, content = draw_body(random.Random(seed))
            answer = client.post(address, content=content)
            statuses[answer.status_code] += 1
            if answer.status_code >= 500:
                print(f"seed {seed}: {answer.status_code} {answer.text}")
        engine = application.service.engine
        assert engine is not None
        print(dict(statuses), "pages held:", [pool.num_used for pool in engine.state.pools])
    return 0


if __name__ == "__main__":
    sys.exit(main())

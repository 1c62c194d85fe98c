# SPDX-License-Identifier: Apache-2.0
"""The page of a run that goes on, for the browser on this machine: two addresses, both read-only."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from megatron.core.errors import ConfigError
from megatron.report.page import build_data, render
from megatron.report.run_record import RunRecord

_HOST = "127.0.0.1"
_KNOWN_HOSTS = ("127.0.0.1", "localhost")


def build_server(records: Sequence[RunRecord], port: int) -> ThreadingHTTPServer:
    """A server on the loopback address whose page follows the runs. Raises ConfigError for a port that is taken."""
    lock = threading.Lock()

    def read() -> dict[str, Any]:
        # One reader at a time: the records keep what they have read.
        with lock:
            for record in records:
                record.refresh()
            return build_data(records)

    class Handler(_PageHandler):
        read_data = staticmethod(read)

    try:
        return ThreadingHTTPServer((_HOST, port), Handler)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--port {port} is not to be had ({reason}); give another, or 0 for any") from error


class _PageHandler(BaseHTTPRequestHandler):
    """Answers / and /data.json."""

    read_data: Callable[[], dict[str, Any]]

    def do_GET(self) -> None:  # noqa: N802 (http.server's name)
        """Answer with the page, or only with its numbers."""
        # A page from elsewhere could reach this server under another name that resolves to this address.
        if (self.headers.get("Host") or "").rpartition(":")[0] not in _KNOWN_HOSTS:
            self.send_error(403)
            return
        if self.path not in ("/", "/data.json"):
            self.send_error(404)
            return
        try:
            data = self.read_data()
        except (ConfigError, OSError) as error:
            self.send_error(503, "the run cannot be read", str(error))
            return
        is_page = self.path == "/"
        body = (render(data, is_live=True) if is_page else json.dumps(data)).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8" if is_page else "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Keep silent: the terminal has the address, and requests come every few seconds."""

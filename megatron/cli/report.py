# SPDX-License-Identifier: Apache-2.0
"""Make a page of a run: its curves, what happened to it, where its time goes, and the flags to try.

    python -m megatron report runs/a                      writes a.html
    python -m megatron report runs/a runs/b --output comparison.html
    python -m megatron report runs/a --live               follows the run on http://127.0.0.1:8600/

RUN_DIR: a directory of --metrics-dir, one of --save, or one that holds both; profiles and pipeline traces below it are
read, too. The page is one file that needs no network; if matplotlib is installed, a folder next to it has its drawings
as PNG files. Nothing in RUN_DIR is changed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from megatron.core.errors import ConfigError, StorageError, command_line
from megatron.core.optional_deps import available, require
from megatron.report.live import build_server
from megatron.report.page import build_data, render
from megatron.report.pictures import write_pictures
from megatron.report.run_record import open_runs
from megatron.training.flags.argument import ProgramParser, path


@command_line
def main() -> int:
    """Write the page, or serve it until Ctrl-C."""
    parser = ProgramParser(__doc__, see="report --help")
    parser.add_argument("runs", type=path, nargs="+", metavar="RUN_DIR")
    parser.add_argument("--output", type=path, metavar="FILE.html", help="the page (RUN_DIR's name with .html)")
    parser.add_argument(
        "--png",
        type=path,
        metavar="DIR",
        help="for a PNG of each drawing (the page's name with _png; needs matplotlib)",
    )
    parser.add_argument("--no-png", action="store_true", help="the page alone")
    parser.add_argument("--live", action="store_true", help="serve the page on this machine while the run goes on")
    parser.add_argument("--port", type=int, default=8600, metavar="N", help="of --live (8600); 0: any that is free")
    arguments = parser.parse_args()
    if not 0 <= arguments.port < 65536:
        raise ConfigError(f"--port {arguments.port} must be 0 to 65535")
    records = open_runs(arguments.runs)
    if arguments.live:
        if arguments.output or arguments.png is not None:
            raise ConfigError("--live writes nothing: leave out --output and --png, or --live")
        return _serve(build_server(records, arguments.port))
    data = build_data(records)
    output = arguments.output or Path(f"{arguments.runs[0].resolve().name}.html")
    _write(output, render(data).encode("utf-8", errors="replace"))
    pictures = arguments.png or output.with_name(f"{output.stem}_png")
    if not arguments.no_png and (arguments.png is not None or available("matplotlib")):
        _write_pictures(data, pictures)
    for record, run in zip(records, data["runs"], strict=True):
        for note in record.notes:
            print(f"note: {record.name}: {note}", file=sys.stderr)
        print(f"{record.name}: {run['verdict']['sentence']}")
    print(f"page: {output}")
    return 0


def _write(output: Path, content: bytes) -> None:
    partial = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        partial.write_bytes(content)
        os.replace(partial, output)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise StorageError(f"--output {output} cannot be written ({error.strerror}); name another file") from error


def _write_pictures(data: dict[str, object], folder: Path) -> None:
    matplotlib = require("matplotlib", needed_by=f"--png {folder}")
    matplotlib.use("Agg")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written = write_pictures(data, folder, require("matplotlib.pyplot", needed_by=f"--png {folder}"))
    except OSError as error:
        raise StorageError(f"--png {folder} cannot be written ({error.strerror}); name another directory") from error
    print(f"pictures: {len(written)} in {folder}")


def _serve(server: object) -> int:
    from http.server import ThreadingHTTPServer

    assert isinstance(server, ThreadingHTTPServer)
    print(f"live: http://127.0.0.1:{server.server_address[1]}/ (Ctrl-C ends it)", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
    return 0

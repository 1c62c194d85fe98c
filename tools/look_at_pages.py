# SPDX-License-Identifier: Apache-2.0
"""Looks at every page of the documentation's site in Chromium: does anything lie where no one can see it?

python tools/look_at_pages.py                          at 1280 and 390 pixels; exit code 2: something is cut off
python tools/look_at_pages.py --pictures DIR           also a picture of every page at every width
python tools/look_at_pages.py --page launching --width 800

What scrolls within a box of its own can be reached, and is no fault. Needs mkdocs (pip install -e .[docs]) and
Chromium.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import http.server
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import Empty, Queue
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from megatron.core.errors import ConfigError, command_line  # noqa: E402

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
LIMIT_SECONDS = 300.0
# A frame is a window of its own to the rules of the page that ask how wide it is.
LOOKER = """<!doctype html><body><script>
function findCut(node, box, width) {
  let right = box.right;
  for (let place = node.parentElement; place; place = place.parentElement) {
    const style = getComputedStyle(place), edge = place.getBoundingClientRect().right;
    // Overflow has no meaning for what is a piece of a line.
    if (style.display === "inline" || style.overflowX === "visible") continue;
    if (style.overflowX === "auto" || style.overflowX === "scroll") right = Math.min(right, edge);
    else if (right > edge + 1) return true;
  }
  return right > width + 1;
}
function look(page, frame, width) {
  const text = frame.contentDocument, cut = [];
  const walker = text.createTreeWalker(text.querySelector(".rst-content"), NodeFilter.SHOW_ALL);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    if (node.nodeType !== Node.TEXT_NODE && !["IMG", "svg"].includes(node.nodeName)) continue;
    const range = text.createRange();
    range.selectNode(node);
    const box = range.getBoundingClientRect();
    if (box.width && findCut(node, box, width)) cut.push((node.textContent || node.src).trim().slice(0, 60));
  }
  const tables = [...text.querySelectorAll(".rst-content table")];
  const wide = tables.filter(table => table.scrollWidth > table.clientWidth + 1);
  return {page, width, cut, scrolling: wide.length, height: text.documentElement.scrollHeight};
}
(async () => {
  const found = [];
  for (const [page, width] of QUESTIONS) {
    const frame = document.createElement("iframe");
    frame.width = width; frame.height = 900; frame.style.border = 0; frame.src = page;
    await new Promise(done => { frame.onload = done; document.body.append(frame); });
    await frame.contentDocument.fonts.ready;
    found.push(look(page, frame, width));
    frame.remove();
  }
  await fetch("/found", {method: "POST", body: JSON.stringify(found)});
})();
</script>"""


class _Site(http.server.SimpleHTTPRequestHandler):
    """The built site, the page that looks at it, and an ear for what it finds."""

    def __init__(self, *args: Any, looker: str, found: Queue[Any], **kwargs: Any) -> None:
        self.looker, self.found = looker, found
        super().__init__(*args, **kwargs)

    def do_GET(self) -> None:
        """Answer with the looker, or with a file."""
        if self.path != "/look":
            return super().do_GET()
        self._answer(self.looker.encode())
        return None

    def do_POST(self) -> None:
        """Take what was found."""
        self.found.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._answer(b"")

    def _answer(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(content)

    def handle(self) -> None:
        """Answer; a browser that has seen enough does not wait for the rest."""
        with contextlib.suppress(ConnectionError):
            super().handle()

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


def find_browser() -> str | None:
    """Return the first of Chromium's names that is installed, or None."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def look(site: Path, pages: Sequence[str], widths: Sequence[int]) -> list[dict[str, Any]]:
    """Open the pages (`launching.html`) of a built site at the widths in pixels.

    Returns for each page, width: cut (the beginning of each text that is cut off), scrolling (tables that scroll in
    their own box), height in pixels.
    """
    found: Queue[list[dict[str, Any]]] = Queue()
    looker = LOOKER.replace("QUESTIONS", json.dumps([(page, width) for page in pages for width in widths]))
    handler = functools.partial(_Site, directory=str(site), looker=looker, found=found)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, tempfile.TemporaryDirectory() as profile:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/look"
        browser = subprocess.Popen(_command(profile, "--remote-debugging-port=0", address), stderr=subprocess.DEVNULL)
        try:
            return found.get(timeout=LIMIT_SECONDS)
        except Empty:
            raise ConfigError(
                f"{find_browser()} has not seen all pages after {LIMIT_SECONDS:.0f} s; try again"
            ) from None
        finally:
            browser.kill()
            browser.wait()
            server.shutdown()


def _command(profile: str, *arguments: str) -> list[str]:
    browser = find_browser()
    if browser is None:
        raise ConfigError(f"none of {', '.join(BROWSERS)} is installed; install Chromium")
    # Root, whose browser refuses its sandbox, is who one is in a container.
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={profile}"]
    # What a page asks of other hosts is not waited for.
    options.append("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
    return [browser, *options, *arguments]


def take_pictures(site: Path, seen: Sequence[dict[str, Any]], directory: Path) -> Iterator[Path]:
    """Write a picture of each page as it was seen, PAGE-WIDTH.png; the first 6000 pixels of long ones."""
    directory.mkdir(parents=True, exist_ok=True)
    for page in seen:
        picture = directory / f"{Path(page['page']).stem}-{page['width']}.png"
        size = f"--window-size={page['width']},{min(page['height'], 6000)}"
        with tempfile.TemporaryDirectory() as profile:
            address = (site / page["page"]).as_uri()
            subprocess.run(_command(profile, size, f"--screenshot={picture}", address), check=True, capture_output=True)
        yield picture


@command_line
def main() -> int:
    """Build the site, look at it, and print what is cut off."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--page", action="append", metavar="NAME", help="only this page (all)")
    parser.add_argument("--width", action="append", type=int, metavar="PIXELS", help="of the window (1280 and 390)")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="also write a picture of each page there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        site = Path(directory)
        build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", directory]
        subprocess.run(build, cwd=ROOT, check=True)
        names = options.page or sorted(page.stem for page in (ROOT / "docs").glob("*.md"))
        seen = look(site, [f"{name}.html" for name in names], options.width or [1280, 390])
        for page in seen:
            scrolling = f", {page['scrolling']} tables scroll" if page["scrolling"] else ""
            print(f"{page['page']} at {page['width']}: {len(page['cut'])} cut off{scrolling}")
            for text in page["cut"]:
                print(f"    {text}")
        if options.pictures:
            for picture in take_pictures(site, seen, options.pictures):
                print(picture)
    return 2 if any(page["cut"] for page in seen) else 0


if __name__ == "__main__":
    sys.exit(main())

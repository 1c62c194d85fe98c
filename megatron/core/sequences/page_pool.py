# SPDX-License-Identifier: Apache-2.0
"""Pages of a memory, by number: which are free, who uses one, and which hold content that may serve again.

    free --take--> in use by one --share--> by several --release--> by nobody: free, or idle where its content is known
    idle --find, share--> in use again;  idle --take, when nothing is free--> its content is forgotten, oldest first

A page is as many tokens of one sequence in all layers of a group. Only numbers are here; what pages hold is elsewhere.
"""

from __future__ import annotations


class PagePool:
    """The pages of one group of layers."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        # A byte for each page, 0 where it is in use: stretches of free pages are found by a search for bytes. 2 is a
        # free one after a sequence that may grow, taken by others only where there is none else.
        self._free = bytearray(b"\1" * pages)
        self._num_free = pages
        self._users = [0] * pages
        self._page_of: dict[bytes, int] = {}
        self._content_of: dict[int, bytes] = {}
        self._idle: dict[int, None] = {}  # in the order in which they were released

    @property
    def num_available(self) -> int:
        """Pages that `take` can give."""
        return self._num_free + len(self._idle)

    @property
    def num_used(self) -> int:
        """Pages that somebody uses."""
        return self.pages - self.num_available

    def take(self, before: int | None = None, stretch: int = 1) -> int | None:
        """Take a page for one user; None where all are in use.

        before: the page of the tokens before. The one after it is taken if it is free, and else one with which as many
        free pages as `stretch` begin: what lies side by side can be read where it lies.
        """
        page = -1 if before is None else before + 1
        if before is None or page >= self.pages or not self._free[page]:
            page = self._free.find(b"\1" * stretch)
            if page >= 0:
                self._free[page + 1 : page + stretch] = b"\2" * (stretch - 1)
            else:
                page = self._free.find(1)
                page = self._free.find(2) if page < 0 else page
        if page >= 0:
            self._free[page] = 0
            self._num_free -= 1
        elif self._idle:
            page = next(iter(self._idle))
            del self._idle[page]
            self._forget(page)
        else:
            return None
        self._users[page] = 1
        return page

    def share(self, page: int) -> None:
        """Add a user to a page that is in use or idle."""
        self._idle.pop(page, None)
        self._users[page] += 1

    def release(self, page: int) -> None:
        """Take away a user."""
        assert self._users[page] > 0, f"page {page} has no user"
        self._users[page] -= 1
        if self._users[page]:
            return
        behind = page + 1
        while behind < self.pages and self._free[behind] == 2:
            self._free[behind] = 1
            behind += 1
        if page in self._content_of:
            self._idle[page] = None
        else:
            self._free[page] = 1
            self._num_free += 1

    def may_write(self, page: int) -> bool:
        """Return True where a single user has the page, and its content has not been made known."""
        return self._users[page] == 1 and page not in self._content_of

    def note(self, page: int, content: bytes) -> None:
        """Make known what a page holds from now on, by a digest; the first page with a content is the known one."""
        if content not in self._page_of and page not in self._content_of:
            self._page_of[content], self._content_of[page] = page, content

    def find(self, content: bytes) -> int | None:
        """The page that holds this, in use or idle."""
        return self._page_of.get(content)

    def forget_all(self) -> None:
        """Forget all contents: the model has other weights."""
        for page in [*self._content_of]:
            self._forget(page)
        for page in self._idle:
            self._free[page] = 1
        self._num_free += len(self._idle)
        self._idle.clear()

    def _forget(self, page: int) -> None:
        del self._page_of[self._content_of.pop(page)]

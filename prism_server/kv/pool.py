"""Numbered places (GPU pages, or host slots): who references them, and when a freed one may be used again."""

from __future__ import annotations

from collections import deque


class PagePool:
    """Reference-counted pages `0 .. num_pages - 1`.

    A page whose last reference goes while a launched step may still name it is *retired*: it rejoins the free pages
    when that step has completed. Steps complete in order.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._references = [0] * num_pages
        self._named_by_step = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._retired: deque[tuple[int, int]] = deque()
        self.completed_step = 0

    @property
    def num_free(self) -> int:
        """Pages that can be handed out now."""
        return len(self._free)

    @property
    def num_retired(self) -> int:
        """Pages that become free when launched steps complete."""
        return len(self._retired)

    def references(self, page: int) -> int:
        return self._references[page]

    def allocate(self) -> int:
        """A free page with one reference; the caller has asked `num_free` first."""
        page = self._free.pop()
        self._references[page] = 1
        self._named_by_step[page] = 0
        return page

    def retain(self, page: int) -> None:
        """One more reference on a page that somebody holds; each one needs its own `release`."""
        if self._references[page] < 1:
            raise AssertionError(f"page {page} is retained but nobody holds it")
        self._references[page] += 1

    def release(self, page: int, named_by_step: int) -> None:
        """Drop one reference; `named_by_step` is the last launched step that reads or writes the page through it.

        Who goes last need not be who named the page last: the latest step of all counts.
        """
        if self._references[page] < 1:
            raise AssertionError(f"page {page} is released more often than it was taken")
        self._references[page] -= 1
        self._named_by_step[page] = max(self._named_by_step[page], named_by_step)
        if self._references[page] == 0:
            if self._named_by_step[page] > self.completed_step:
                self._retired.append((self._named_by_step[page], page))
            else:
                self._free.append(page)

    def complete(self, step: int) -> None:
        """Every step up to `step` has completed: what they named is free."""
        self.completed_step = step
        waiting = deque[tuple[int, int]]()
        for named_by_step, page in self._retired:
            if named_by_step <= step:
                self._free.append(page)
            else:
                waiting.append((named_by_step, page))
        self._retired = waiting

    def check_integrity(self) -> None:
        """Raise AssertionError unless free, retired and referenced pages partition the pool."""
        idle = sorted([*self._free, *(page for _, page in self._retired)])
        unreferenced = [page for page, count in enumerate(self._references) if count == 0]
        if idle != unreferenced:
            raise AssertionError(f"idle pages {idle} are not the unreferenced ones {unreferenced}")

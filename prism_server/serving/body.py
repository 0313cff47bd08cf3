"""Bodies of requests, and the memory that all of them together may take."""

from __future__ import annotations

from prism_server.http.byte_budget import ByteBudget

LEAST_PIECE_BYTES = 1 << 14
"""Copied in a microsecond."""
LARGEST_BODIES = 8
USUAL_BODY_BYTES = 2 << 20
"""A photo, or some pages: as many as are let in may be there."""


def budget_for(max_body_bytes: int, max_inside: int) -> ByteBudget:
    """Room for some bodies of the largest size, and for usual ones of everybody inside. What counts are bodies, or the
    media that were in them."""
    return ByteBudget("the server", max(LARGEST_BODIES * max_body_bytes, USUAL_BODY_BYTES * max_inside))


class Body:
    """The body of a request, in the pieces in which it comes. One piece of memory that grows is copied again and again:
    that would hold up the event loop, and the engine's thread with it."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._counted_bytes = 0
        self._pieces: list[bytes] = []

    def add(self, piece: bytes) -> None:
        """On the event loop. Small pieces become one, so that a body of crumbs takes no more room than others. Raises
        Overloaded where all bodies together are too large."""
        self._budget.take(len(piece))
        self._counted_bytes += len(piece)
        if self._pieces and len(self._pieces[-1]) < LEAST_PIECE_BYTES:
            self._pieces[-1] += piece
        else:
            self._pieces.append(piece)

    def take(self) -> bytes:
        """All of it, once; for a worker. (Python's lock is given away while more than a megabyte is joined.) It counts
        on, as its media do in its place."""
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)

    @property
    def is_counted(self) -> bool:
        return self._counted_bytes > 0

    def let_go(self) -> None:
        """Counts no more: on the event loop, once nothing of it is needed. Idempotent."""
        self._budget.give_back(self._counted_bytes)
        self._counted_bytes = 0
        self._pieces = []

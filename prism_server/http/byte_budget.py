"""How much memory the bodies of all requests may take together."""

from __future__ import annotations

from prism_server.errors import Overloaded


class ByteBudget:
    """Bytes of bodies that a process may hold, over all requests. Event loop only."""

    def __init__(self, holder: str, most_bytes: int) -> None:
        """`holder` is whom a refusal names: `the router`."""
        self._holder = holder
        self.most_bytes = most_bytes
        self.held_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Raises Overloaded."""
        if self.held_bytes + num_bytes > self.most_bytes:
            raise Overloaded(f"{self._holder} holds {self.held_bytes} bytes of bodies, the limit; try again later")
        self.held_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self.held_bytes -= num_bytes

"""Rendezvous hashing: every key has its own order of the pods, which moves no key that it need not move."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from prism_server.identity import Digest, framed_digest

_TWO_53 = float(1 << 53)


@lru_cache(maxsize=4096)
def _home_hash(home: str) -> int:
    return int.from_bytes(framed_digest("home", (home,))[:8], "little")


class Rendezvous:
    """The orders of one set of homes. `weights` are relative shares of the keys (pages, where pods differ)."""

    def __init__(self, homes: Sequence[str], weights: Sequence[float]) -> None:
        if len(homes) != len(weights) or not all(weight > 0 for weight in weights):
            raise ValueError(f"every home needs a weight above 0: {homes}, {weights}")
        self._hashes = np.array([_home_hash(home) for home in homes], dtype=np.uint64)
        self._weights = None if len(set(weights)) <= 1 else np.array(weights, dtype=np.float64)

    def order(self, key: Digest) -> list[int]:
        """Indices of the homes, the key's own first. Depends on no other home than those two that it compares.

        Scores are -weight / ln(u) with u uniform in (0, 1) from (home, key): weighted rendezvous (Schindelhauer and
        Schomaker, 2005); with equal weights the order of the hashes themselves.
        """
        mixed = _mixed(self._hashes ^ np.uint64(int.from_bytes(key[:8], "little")))
        if self._weights is None:
            order: list[int] = np.argsort(mixed, kind="stable")[::-1].tolist()
            return order
        uniform = ((mixed >> np.uint64(11)).astype(np.float64) + 0.5) / _TWO_53
        weighted: list[int] = np.argsort(self._weights / np.log(uniform), kind="stable").tolist()
        return weighted


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64, which spreads every bit over all 64 (Steele, Lea, Flood, 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))

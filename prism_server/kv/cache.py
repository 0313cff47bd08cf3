"""The KV cache as the scheduler sees it: device pages, host slots and the prefix index behind one door."""

from __future__ import annotations

from prism_server.kv.pool import PagePool
from prism_server.kv.prefix_index import PrefixIndex

BACKUP_SCAN_PAGES = 16
"""How many of the coldest pages are looked at for a backup in one step."""
BACKUP_FREE_SHARE = 4
"""Cold pages are backed up to the host while less than 1 / this of the pool is free."""


class KVCache:
    """`num_pages` device pages of `page_tokens` rows, `num_host_slots` host slots (0: no host tier)."""

    def __init__(self, num_pages: int, page_tokens: int, num_host_slots: int = 0, prefix_cache: bool = True) -> None:
        self.page_tokens = page_tokens
        self.pool = PagePool(num_pages)
        self.host = PagePool(num_host_slots)
        self.index = PrefixIndex(self.pool, self.host, page_tokens, prefix_cache)

    @property
    def num_available(self) -> int:
        """Pages that are free, or can be made free by forgetting idle prefixes (some after launched steps complete)."""
        return self.pool.num_free + self.pool.num_retired + self.index.num_evictable

    def pages_for(self, num_rows: int) -> int:
        return -(-num_rows // self.page_tokens)

    def try_free(self, num_pages: int) -> bool:
        """Whether `num_pages` can be allocated now, forgetting idle prefixes if need be."""
        missing = num_pages - self.pool.num_free
        if missing > 0:
            self.index.reclaim(missing)
        return self.pool.num_free >= num_pages

    def is_waiting_for_steps(self) -> bool:
        """Whether more pages will be free, or can be, once the launched steps have completed."""
        return self.pool.num_retired > 0 or self.index.num_evictable > 0

    def complete(self, step: int) -> None:
        """Every step up to `step` has completed: device pages and host slots that only they named are free."""
        self.pool.complete(step)
        self.host.complete(step)

    def back_up_cold(self, step: int) -> list[tuple[int, int]]:
        """(page, host slot) copies that keep cold prefixes findable when their device pages go."""
        copies: list[tuple[int, int]] = []
        if self.host.num_pages == 0 or self.pool.num_free * BACKUP_FREE_SHARE >= self.pool.num_pages:
            return copies
        for node in self.index.coldest_without_backup(BACKUP_SCAN_PAGES):
            slot = self.index.take_host_slot(keep=node)
            if slot is None:
                break
            if node.page is None:  # forgotten with its parent's subtree while room was made
                self.host.release(slot, 0)
                continue
            self.index.back_up(node, slot, step)
            copies.append((node.page, slot))
        return copies

    def check_integrity(self) -> None:
        self.pool.check_integrity()
        self.host.check_integrity()
        self.index.check_integrity()

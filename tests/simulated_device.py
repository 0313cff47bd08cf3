"""A device for the scheduler's plans whose KV rows are bytes.

The bytes of a row are a digest of all rows before it, read back from the pages, and of its own token or feature. A row
that was lost, swapped, overwritten or taken from a wrong place changes every token that comes after it.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter, deque
from dataclasses import dataclass, field

from prism_server.engine.plan import StepPlan, StepResult
from prism_server.errors import BadRequest
from prism_server.media.item import ItemKey

EOS = 0
VOCABULARY = 6
OPEN, PAD, CLOSE = 10, 11, 12
VISION_BLOCKS = 3
BYTES_PER_FEATURE = 10
EMPTY = (b"", b"")


def row_bytes(before: list[tuple[bytes, bytes]], token: object) -> tuple[bytes, bytes]:
    """Payload and scale of a row after the rows `before` it."""
    hasher = hashlib.sha256()
    for payload, scale in before:
        hasher.update(payload + scale)
    payload = hasher.copy()
    payload.update(repr(("payload", token)).encode())
    hasher.update(repr(("scale", token)).encode())
    return payload.digest()[:16], hasher.digest()[:4]


def drawn_token(last: tuple[bytes, bytes]) -> int:
    """Greedy decoding of this world: 0 (the end) once in eight."""
    value = last[0][0]
    return EOS if value % 8 == 0 else 1 + value % (VOCABULARY - 1)


def feature(key: ItemKey, offset: int) -> tuple[bytes, int]:
    return (key.content_id, offset)


@dataclass(frozen=True)
class Sizes:
    """One world's sizes; everything is tiny so that every corner is met often."""

    num_pages: int = 6
    page_tokens: int = 3
    host_slots: int = 0
    feature_tokens: int = 8
    chunk_tokens: int = 0
    max_running: int = 4
    max_step_tokens: int = 16
    depth: int = 1
    prefix_cache: bool = True
    overcommit: bool = False
    """Admission promises pages that are not there: what else keeps the engine moving has to do it alone."""

    @classmethod
    def draw(cls, rng: random.Random) -> Sizes:
        return cls(
            num_pages=rng.randint(2, 8),
            page_tokens=rng.randint(2, 4),
            host_slots=rng.choice([0, 0, 1, 3, 6]),
            feature_tokens=rng.choice([4, 5, 8, 20]),
            chunk_tokens=rng.choice([0, 0, 1, 2, 5]),
            max_running=rng.randint(1, 5),
            max_step_tokens=rng.choice([5, 8, 16, 64]),
            depth=rng.choice([0, 1, 1]),
            prefix_cache=rng.random() < 0.9,
            overcommit=rng.random() < 0.2,
        )


@dataclass
class Slot:
    """The device's side of a sequence."""

    table: dict[int, int] = field(default_factory=dict)
    last_token: int | None = None


@dataclass
class Named:
    """What a launched plan reads or writes: by copies (host slots below zero), and by the tables of its rows."""

    step: int
    copied: set[int]
    tables: dict[int, int]
    """page -> the one whose rows stand on it; of several that share a page, the last: none of them computes there."""


class SimulatedExecutor:
    """Runs plans on pages of bytes. Copies of one class run in random order; swap-ins land when the step completes."""

    def __init__(self, sizes: Sizes, rng: random.Random) -> None:
        self.rng, self.page_tokens = rng, sizes.page_tokens
        self.pages = [[EMPTY] * sizes.page_tokens for _ in range(sizes.num_pages)]
        self.host = [[EMPTY] * sizes.page_tokens for _ in range(sizes.host_slots)]
        self.slots: dict[int, Slot] = {}
        self.staged: dict[ItemKey, int] = {}
        self.features: set[ItemKey] = set()
        self.encodes: Counter[ItemKey] = Counter()
        self.queue: deque[StepPlan | ItemKey] = deque()
        self.launched_tables: dict[int, dict[int, int]] = {}
        self.failing: set[ItemKey] = set()
        self.in_arrival: set[int] = set()
        self.named: deque[Named] = deque()
        self.users: dict[int, int] = {}
        self.num_users = 0

    def stage(self, key: ItemKey) -> None:
        self.queue.append(key)

    def launch(self, plan: StepPlan) -> None:
        """Takes the plan; like a device it runs it later, after everything that was given to it before."""
        plan.check()
        self._check_reuse(plan)
        self.queue.append(plan)

    def complete(self, step: int) -> StepResult:
        """Runs what is queued up to this step."""
        while True:
            work = self.queue.popleft()
            if isinstance(work, ItemKey):
                self.staged[work] = 0
                continue
            result = self._execute(work)
            if work.step == step:
                return result

    def finish_queue(self) -> None:
        """Idle: what was staged since the last plan arrives, too."""
        while self.queue:
            work = self.queue.popleft()
            assert isinstance(work, ItemKey)
            self.staged[work] = 0

    def _execute(self, plan: StepPlan) -> StepResult:
        for start in plan.slot_starts:
            self.slots[start.slot] = Slot()
        for page in plan.pages:
            self.slots[page.slot].table[page.index] = page.page
        arrivals = self._copy(plan)
        failed = self._encode(plan)
        tokens = self._compute(plan)
        for page, rows in arrivals:
            self.pages[page] = rows
            self.in_arrival.discard(page)
        assert self.named.popleft().step == plan.step
        return StepResult(plan.step, tuple(tokens), (None,) * len(tokens), failed)

    def _check_reuse(self, plan: StepPlan) -> None:
        """What a launched plan reads or writes is not given to anything else before that plan has completed."""
        for start in plan.slot_starts:
            self.launched_tables[start.slot] = {}
            self.users[start.slot] = self.num_users
            self.num_users += 1
        for page in plan.pages:
            self.launched_tables[page.slot][page.index] = page.page
        written = {copy.target for copy in plan.row_copies} | {page for _, page in plan.swap_in}
        written |= {-1 - slot for _, slot in plan.swap_out}  # host slots are counted below zero
        for named in self.named:
            assert not written & (named.copied | named.tables.keys()), "what a launched plan names is overwritten"
        copied = written | {-1 - slot for slot, _ in plan.swap_in} | {page for page, _ in plan.swap_out}
        self.named.append(Named(plan.step, copied | {copy.source for copy in plan.row_copies}, {}))
        for rows in plan.sequences:
            self._check_computed(rows.slot, rows.start, rows.start + rows.count)

    def _check_computed(self, slot: int, start: int, end: int) -> None:
        """The last plan computes rows [start, end) of the slot: in pages that no plan of another user still reads."""
        table, user = self.launched_tables[slot], self.users[slot]
        num_read = 1 + (end - 1) // self.page_tokens  # behind them may stand what a preempted one was to get
        for index in range(start // self.page_tokens, num_read):
            for named in self.named:
                assert named.tables.get(table[index], user) == user, "what a launched plan reads is computed anew"
        for index in range(num_read):
            self.named[-1].tables[table[index]] = user

    def _copy(self, plan: StepPlan) -> list[tuple[int, list[tuple[bytes, bytes]]]]:
        """Returns the pages that are being swapped in; nobody may touch them before the step has completed."""
        arrivals = [(page, list(self.host[slot])) for slot, page in plan.swap_in]
        self.rng.shuffle(arrivals)
        self.in_arrival |= {page for page, _ in arrivals}
        for page, slot in self.rng.sample(plan.swap_out, len(plan.swap_out)):
            assert page not in self.in_arrival, "a page is swapped out while it is swapped in"
            self.host[slot] = list(self.pages[page])
        for copy in self.rng.sample(plan.row_copies, len(plan.row_copies)):
            assert copy.source not in self.in_arrival, "a page is copied while it is swapped in"
            self.pages[copy.target][: copy.rows] = self.pages[copy.source][: copy.rows]
        return arrivals

    def _encode(self, plan: StepPlan) -> dict[ItemKey, BadRequest]:
        failed: dict[ItemKey, BadRequest] = {}
        for key in plan.drop_features:
            self.features.discard(key)
            if key in self.staged:
                self.staged[key] = 0
        for key in plan.drop_staged:
            del self.staged[key]
        for work in plan.encode:
            assert self.staged[work.key] == work.first_block, "blocks of an item are run out of order"
            self.staged[work.key] = work.last_block
            self.encodes[work.key] += work.first_block == 0
            if work.finishes:
                assert work.last_block == VISION_BLOCKS
                del self.staged[work.key]
                self.features.add(work.key)
                if work.key in self.failing:
                    failed[work.key] = BadRequest("the encoder returned another number of rows")
        return failed

    def _compute(self, plan: StepPlan) -> list[int]:
        shown: dict[int, tuple[bytes, int]] = {}
        for media in plan.media:
            assert media.key in self.features, "rows of an item are computed without its features"
            shown |= {media.row + i: feature(media.key, media.offset + i) for i in range(media.count)}
        tokens, row = [], 0
        for rows in plan.sequences:
            slot = self.slots[rows.slot]
            ids = [slot.last_token] if rows.token_ids is None else [int(i) for i in rows.token_ids]
            before = [self._read(slot, r) for r in range(rows.start)]
            for number, token in enumerate(ids, rows.start):
                before.append(row_bytes(before, shown.get(row, token)))
                self._write(slot, number, before[-1])
                row += 1
            if rows.draw is not None:
                slot.last_token = drawn_token(before[-1])
                tokens.append(slot.last_token)
        return tokens

    def _read(self, slot: Slot, row: int) -> tuple[bytes, bytes]:
        page = slot.table[row // self.page_tokens]
        assert page not in self.in_arrival, "a page is read while it is swapped in"
        return self.pages[page][row % self.page_tokens]

    def _write(self, slot: Slot, row: int, content: tuple[bytes, bytes]) -> None:
        page = slot.table[row // self.page_tokens]
        assert page not in self.in_arrival, "a page is written while it is swapped in"
        self.pages[page][row % self.page_tokens] = content

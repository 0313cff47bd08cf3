"""The media side of a prefill chunk: features that are there, features to be encoded, where the chunk must end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container

from prism_server.engine.cost_model import StepBudget
from prism_server.engine.feature_cache import FeatureCache
from prism_server.engine.media_desk import MediaDesk
from prism_server.engine.plan import EncodeWork
from prism_server.engine.plan_builder import PlanBuilder
from prism_server.engine.sequence import Sequence
from prism_server.errors import BadRequest
from prism_server.media.item import ItemFacts, ItemKey
from prism_server.prompt.encoded import MediaSpan


class Prefill:
    """Pins are taken when an item's rows come up, and given back when its last row is planned."""

    def __init__(
        self,
        features: FeatureCache,
        desk: MediaDesk,
        feature_bytes: Callable[[int], int],
        vision_blocks: int,
        counters: Counter[str],
    ) -> None:
        self._features = features
        self._desk = desk
        self._feature_bytes = feature_bytes
        self._vision_blocks = vision_blocks
        self._counters = counters
        self._completed: list[ItemKey] = []
        self._dropped: list[ItemKey] = []

    def check_budget(self, sequence: Sequence) -> None:
        """Raise BadRequest for a medium whose features can never be held."""
        for facts in sequence.missing_items():
            needed, budget = self._feature_bytes(facts.num_tokens), self._features.capacity_bytes
            if needed > budget:
                raise BadRequest(
                    f"a medium of {facts.num_tokens} tokens needs {needed} bytes of encoder output, "
                    f"and the budget is {budget} bytes",
                    param="messages",
                )

    def want_missing(self, sequence: Sequence) -> None:
        """Ask for the pixels of every item that the sequence still has to show and nobody has encoded."""
        for facts in sequence.missing_items():
            if not self._features.holds(facts.key):
                self._desk.want(sequence, facts)

    def plan_media(self, builder: PlanBuilder, budget: StepBudget, sequence: Sequence, end: int) -> int:
        """Make the features of the rows [num_planned, end) ready, or say at which row the chunk has to end."""
        for span in sequence.spans:
            if span.end <= sequence.num_planned or span.start >= end:
                continue
            if not self._make_ready(builder, budget, sequence, span):
                return max(sequence.num_planned, min(end, span.start))
        return end

    def _make_ready(self, builder: PlanBuilder, budget: StepBudget, sequence: Sequence, span: MediaSpan) -> bool:
        facts = span.facts
        key = facts.key
        if self._features.holds(key):
            self._pin(sequence, key)
            return True
        self._desk.want(sequence, facts)  # also where they are staged: who encodes holds them, whoever else leaves
        if not self._desk.is_staged(key):
            return False
        done = self._features.blocks_done(key)
        if done is None:
            if not budget.may_encode(facts.num_patches):
                return False
            if not self._try_reserve(sequence, span):
                return False
            done = 0
            sequence.encoded_items += 1
            self._counters["encoded_items"] += 1
            self._counters["encoded_media_tokens"] += facts.num_tokens
        elif any(work.key == key for work in builder.encode):
            return False  # this step already does what its time allows
        self._pin(sequence, key)
        return self._encode(builder, budget, sequence, facts, done)

    def _try_reserve(self, sequence: Sequence, span: MediaSpan) -> bool:
        """Room for an item; pins on items that the sequence shows again only later make way when they must."""
        key, num_bytes = span.facts.key, self._feature_bytes(span.facts.num_tokens)
        if self._features.try_reserve(key, num_bytes, sequence.number):
            return True
        chunk = [other for other in sequence.spans if sequence.num_planned < other.end and other.start < span.start]
        if not self._lose_pins(sequence, keep={other.facts.key for other in chunk}):
            return False
        return self._features.try_reserve(key, num_bytes, sequence.number)

    def _encode(
        self, builder: PlanBuilder, budget: StepBudget, sequence: Sequence, facts: ItemFacts, done: int
    ) -> bool:
        blocks = budget.take_blocks(facts.num_patches, self._vision_blocks - done)
        if blocks == 0:
            return False
        last = done + blocks
        finishes = last == self._vision_blocks
        builder.encode.append(EncodeWork(facts.key, facts.grid, facts.num_tokens, done, last, finishes))
        builder.encodes_for.add(sequence)
        self._features.advance(facts.key, last, finishes)
        if finishes:
            self._desk.encoded(facts.key)
        return finishes

    def _pin(self, sequence: Sequence, key: ItemKey) -> None:
        self._features.pin(key, sequence.number)
        sequence.pins[key] = None

    def unpin_passed(self, builder: PlanBuilder, sequence: Sequence) -> None:
        """Give back the pins of items whose last row is planned now (when the plan is built: it still reads them)."""
        for key in tuple(sequence.pins):
            if not any(span.facts.key == key and span.end > sequence.num_planned for span in sequence.spans):
                del sequence.pins[key]
                builder.unpins.append((key, sequence.number))

    def lose_pins(self, sequence: Sequence) -> None:
        """A prefill that gets no pages holds no encoder output; it encodes again if that is gone when it goes on."""
        self._lose_pins(sequence, keep=())

    def _lose_pins(self, sequence: Sequence, keep: Container[ItemKey]) -> bool:
        lost = [key for key in sequence.pins if key not in keep]
        for key in lost:
            del sequence.pins[key]
            self._features.unpin(key, sequence.number)
        sequence.lost_pins += bool(lost)
        return bool(lost)

    def leave(self, sequence: Sequence) -> None:
        for key in sequence.pins:
            self._features.unpin(key, sequence.number)
            self._features.drop_if_idle(key)
        sequence.pins.clear()
        for key in self._desk.leave(sequence):
            self._features.drop_if_idle(key)  # without its pixels nobody could encode the rest

    def take_dropped_features(self) -> tuple[ItemKey, ...]:
        """Items dropped since the last plan, for the next one."""
        completed, dropped = self._features.take_changes()
        self._completed += completed
        self._dropped += dropped
        return dropped

    def report_changes(self) -> tuple[list[ItemKey], list[ItemKey]]:
        """Items completed and dropped since the last call, for whoever follows the cache."""
        changes = self._completed, self._dropped
        self._completed, self._dropped = [], []
        return changes

    def patch_blocks(self, builder: PlanBuilder) -> int:
        """Patches times vision blocks in the plan: what the encoder's time is proportional to."""
        return sum(
            work.grid[0] * work.grid[1] * work.grid[2] * (work.last_block - work.first_block) for work in builder.encode
        )

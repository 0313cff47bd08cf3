"""Figures that an engine publishes: what work costs, and what its caches have given up."""

from __future__ import annotations

import io

import numpy as np
from engine_support import running_engine
from PIL import Image


def noise(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (96, 96, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def test_costs_are_unknown_until_they_are_measured_and_a_patch_is_charged_for_every_block() -> None:
    with running_engine() as driver:
        fresh = driver.engine.stats()
        assert (fresh.ms_per_token, fresh.ms_per_patch) == (None, None)
        driver.ask([noise(1), "word " * 200], max_tokens=3)
        driver.settle()
        stats, cost = driver.engine.stats(), driver.engine._scheduler.cost
        assert stats.ms_per_patch == cost.ms_per_patch_block * driver.engine._scheduler.vision_blocks
        assert stats.ms_per_patch > cost.ms_per_patch_block > 0
        assert stats.ms_per_token == cost.ms_per_token


def test_what_is_forgotten_for_others_is_counted() -> None:
    with running_engine(num_pages=32, engine__feature_cache_bytes=1 << 16) as driver:
        before = driver.counters()
        assert (before["evicted_pages"], before["feature_evictions"]) == (0, 0)
        for seed in range(8):
            driver.ask([noise(seed), "word " * 60], max_tokens=2)
        after = driver.counters()
        assert after["evicted_pages"] > 0
        assert after["feature_evictions"] > 0
        assert after["text_memo_misses"] > 0
        assert after["text_memo_hits"] > 0

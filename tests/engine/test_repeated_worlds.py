"""A seed repeats a world: the same requests in the same order give the same plans, in every process."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from dataclasses import replace

from simulation import Sizes, World
from test_simulated_scheduler import random_move

TRACE = "from test_repeated_worlds import trace_of_worlds; print(trace_of_worlds())"


def trace_of_worlds() -> str:
    """Digest of every plan of some worlds in which many items compete for few places."""
    digest = hashlib.sha256()
    for seed in range(30):
        rng = random.Random(seed)
        sizes = replace(Sizes.draw(rng), num_pages=12, page_tokens=4, feature_tokens=8, max_running=5, chunk_tokens=2)
        world = World(sizes, rng, num_items=6)
        for _ in range(200):
            random_move(world, rng)
            digest.update(repr(tuple(world.launched)).encode())
    return digest.hexdigest()


def test_a_seed_repeats_its_world_whatever_the_hashes_of_the_process_are() -> None:
    traces = set()
    for hash_seed in ("0", "1"):
        env = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        ran = subprocess.run([sys.executable, "-c", TRACE], env=env, capture_output=True, text=True, check=True)
        traces.add(ran.stdout)
    assert len(traces) == 1, "plans depend on the order of a set"

"""Executes step plans with a model: device slots, block tables, features, one encoder batch and one forward a step."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from prism_server.engine.executor import Executor, StepHandle
from prism_server.engine.messages import TokenLogprob
from prism_server.engine.plan import EncodeWork, MediaRows, SequenceRows, StepPlan, StepResult
from prism_server.engine.sampler import Draw, Sampler
from prism_server.errors import PrismError
from prism_server.media.item import ItemKey, Patches
from prism_server.model.qwen3_vl import Qwen3VL
from prism_server.model.text import MediaRows as FeatureRows
from prism_server.model.vision import Features, VisionState
from prism_server.ops.interface import AttentionBatch
from prism_server.ops.kv_storage import HostPages, PagedKV


class _Launched(StepHandle):
    def __init__(self, future: Future[StepResult]) -> None:
        self._future = future

    def wait(self) -> StepResult:
        return self._future.result()


class Runner(Executor):
    """One device. `launch` returns at once: steps run in order on the device's own thread (a GPU's stream is the same
    idea), so that the owner plans a step while the one before runs."""

    def __init__(
        self,
        model: Qwen3VL,
        kv: PagedKV,
        host: HostPages | None,
        num_slots: int,
        max_pages_per_sequence: int,
        eos_token_ids: tuple[int, ...],
        threads: int = 0,
    ) -> None:
        self.model, self._kv, self._host = model, kv, host
        self._device = model.device
        self._page_tokens = kv.layout.page_tokens
        self._sampler = Sampler(model.config.text.vocab_size, self._device, eos_token_ids, model.ops)
        with torch.inference_mode():
            self._last_tokens = torch.zeros(num_slots, dtype=torch.int64, device=self._device)
            tables = (num_slots, max_pages_per_sequence)
            self._block_tables = torch.zeros(tables, dtype=torch.int32, device=self._device)
        self._staged: dict[ItemKey, Patches] = {}
        self._encoding: dict[ItemKey, VisionState] = {}
        self._features: dict[ItemKey, Features] = {}
        self._thread = ThreadPoolExecutor(1, "prism-device")
        if threads:
            self._thread.submit(torch.set_num_threads, threads).result()

    # -- the owner's side --------------------------------------------------------------------------------------------

    def stage(self, key: ItemKey, patches: Patches) -> None:
        self._thread.submit(self._staged.__setitem__, key, patches)

    def launch(self, plan: StepPlan) -> StepHandle:
        return _Launched(self._thread.submit(self.execute, plan))

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    # -- the device's side -------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Everything of a plan, in the plan's order. Called on the device's thread."""
        started_s = time.perf_counter()
        self._start_slots(plan)
        self._copy(plan)
        encode_started_s = time.perf_counter()
        failed = self._encode(plan)
        encode_ms = (time.perf_counter() - encode_started_s) * 1e3 if plan.encode else 0.0
        tokens, logprobs = self._forward(plan) if plan.sequences else ([], [])
        duration_ms = (time.perf_counter() - started_s) * 1e3
        return StepResult(plan.step, tuple(tokens), tuple(logprobs), failed, duration_ms, encode_ms)

    def _start_slots(self, plan: StepPlan) -> None:
        for start in plan.slot_starts:
            self._sampler.start(start)
        if plan.pages:
            # later assignments of one place win, as in the plan's order
            places = {(page.slot, page.index): page.page for page in plan.pages}
            slots, indices = zip(*places, strict=True)
            pages = torch.tensor(list(places.values()), dtype=torch.int32, device=self._device)
            self._block_tables[torch.tensor(slots), torch.tensor(indices)] = pages

    def _copy(self, plan: StepPlan) -> None:
        if plan.swap_in or plan.swap_out:
            assert self._host is not None, "a plan swaps, but there is no host tier"
        if plan.swap_in and self._host is not None:
            slots, pages = zip(*plan.swap_in, strict=True)
            self._host.swap_in(self._kv, slots, pages)
        if plan.swap_out and self._host is not None:
            pages, slots = zip(*plan.swap_out, strict=True)
            self._host.swap_out(self._kv, pages, slots)
        if plan.row_copies:
            copies = plan.row_copies
            sources, targets, rows = zip(*((copy.source, copy.target, copy.rows) for copy in copies), strict=True)
            self.model.ops.copy_rows(self._kv, sources, targets, rows)

    # -- encoder -----------------------------------------------------------------------------------------------------

    def _encode(self, plan: StepPlan) -> dict[ItemKey, PrismError]:
        for key in plan.drop_features:
            self._features.pop(key, None)
            self._encoding.pop(key, None)
        for key in plan.drop_staged:
            self._staged.pop(key, None)
            self._encoding.pop(key, None)
        failed: dict[ItemKey, PrismError] = {}
        batches: dict[tuple[int, int], list[EncodeWork]] = {}
        for work in plan.encode:
            if work.first_block == 0:
                self._encoding[work.key] = self._begin(self._staged[work.key])
            batches.setdefault((work.first_block, work.last_block), []).append(work)
        for (first, last), works in batches.items():
            self.model.vision.advance([self._encoding[work.key] for work in works], last - first)
            for work in works:
                if work.finishes and (error := self._finish(work)) is not None:
                    failed[work.key] = error
        return failed

    def _begin(self, patches: Patches) -> VisionState:
        pixels = torch.from_numpy(patches.pixels.copy())  # the cache's own array is shared and read-only
        return self.model.vision.begin(pixels.to(self._device), patches.grid)

    def _finish(self, work: EncodeWork) -> PrismError | None:
        features = self.model.vision.finish(self._encoding.pop(work.key))
        self._staged.pop(work.key, None)
        if features.num_tokens != work.num_tokens:
            return PrismError(f"the encoder gave {features.num_tokens} rows for a medium of {work.num_tokens} tokens")
        self._features[work.key] = features
        return None

    # -- language ----------------------------------------------------------------------------------------------------

    def _forward(self, plan: StepPlan) -> tuple[list[int], list[TokenLogprob | None]]:
        sequences = plan.sequences
        token_ids, positions = self._inputs(sequences)
        batch = self._attention_batch(sequences)
        media = self._feature_rows(plan.media) if plan.media else None
        hidden = self.model.text.forward(token_ids, positions, self._kv, batch, media)
        ends = np.cumsum([rows.count for rows in sequences])
        drawing = [(int(end) - 1, rows) for end, rows in zip(ends, sequences, strict=True) if rows.draw is not None]
        if not drawing:
            return [], []
        logits = self.model.text.logits(hidden[torch.tensor([row for row, _ in drawing], device=self._device)])
        draws = [Draw(rows.slot, rows.draw or 0) for _, rows in drawing]
        tokens, logprobs = self._sampler.sample(logits, draws)
        self._last_tokens[torch.tensor([draw.slot for draw in draws], device=self._device)] = tokens
        return tokens.tolist(), logprobs

    def _inputs(self, sequences: tuple[SequenceRows, ...]) -> tuple[Tensor, Tensor]:
        """Ids int64 [T], of decode rows from their slots, and positions int64 [3, T]."""
        ids = np.concatenate(
            [np.zeros(1, np.int32) if rows.token_ids is None else rows.token_ids for rows in sequences]
        ).astype(np.int64)
        positions = np.concatenate([rows.positions for rows in sequences], axis=1).astype(np.int64)
        token_ids = torch.from_numpy(ids).to(self._device)
        decodes, row = [], 0
        for rows in sequences:
            if rows.token_ids is None:
                decodes.append((row, rows.slot))
            row += rows.count
        if decodes:
            places = torch.tensor(decodes, device=self._device)
            token_ids[places[:, 0]] = self._last_tokens[places[:, 1]]
        return token_ids, torch.from_numpy(positions).to(self._device)

    def _attention_batch(self, sequences: tuple[SequenceRows, ...]) -> AttentionBatch:
        starts = (0, *np.cumsum([rows.count for rows in sequences]).tolist())
        contexts = tuple(rows.start + rows.count for rows in sequences)
        slots = torch.tensor([rows.slot for rows in sequences], device=self._device)
        rows = torch.from_numpy(np.concatenate([np.arange(r.start, r.start + r.count) for r in sequences]))
        owner = torch.from_numpy(np.repeat(np.arange(len(sequences)), [r.count for r in sequences]))
        rows, owner = rows.to(self._device), owner.to(self._device)
        page_index = self._block_tables[slots[owner], rows // self._page_tokens].long()
        return AttentionBatch.exact(
            starts, contexts, self._block_tables, slots.int(), page_index, rows % self._page_tokens
        )

    def _feature_rows(self, media: tuple[MediaRows, ...]) -> FeatureRows:
        """The features of the step's media rows, gathered in row order, every DeepStack level alike."""
        rows = np.concatenate([np.arange(part.row, part.row + part.count) for part in media])
        levels: list[list[Tensor]] = []
        for part in media:
            features = self._features.get(part.key)
            if features is None:  # its encoding failed: the request fails, its rows only have to be something
                depth = 1 + len(self.model.config.vision.deepstack_blocks)
                zero = torch.zeros(part.count, self.model.config.text.hidden_size, dtype=self.model.dtype)
                levels.append([zero.to(self._device)] * depth)
            else:
                span = slice(part.offset, part.offset + part.count)
                levels.append([level[span] for level in (features.main, *features.deepstack)])
        main, *deepstack = (torch.cat(parts) for parts in zip(*levels, strict=True))
        return FeatureRows(torch.from_numpy(rows).to(self._device), main, tuple(deepstack))

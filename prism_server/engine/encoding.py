"""The vision side of a device: staged pixels, items on their way through the tower, finished features."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from prism_server.engine.encoder_graphs import EncoderGraphs
from prism_server.engine.packet import Packet, Section
from prism_server.engine.plan import EncodeWork, MediaRows, StepPlan
from prism_server.engine.staging import StagedItem
from prism_server.errors import PrismError
from prism_server.media.item import ItemKey
from prism_server.model.qwen3_vl import Qwen3VL
from prism_server.model.text import FeatureRows
from prism_server.model.vision import Features, VisionState


class Encoder:
    """Runs the encoder work of plans. Called by whoever owns the device."""

    def __init__(self, model: Qwen3VL) -> None:
        self._model = model
        self._device = model.device
        self.graphs = EncoderGraphs()
        self.staged: dict[ItemKey, StagedItem] = {}
        self.encoding: dict[ItemKey, VisionState] = {}
        self.features: dict[ItemKey, Features] = {}

    def stage(self, key: ItemKey, item: StagedItem) -> None:
        """Keep an item's pixels until they are encoded or dropped."""
        self.staged[key] = item

    def run(self, plan: StepPlan) -> dict[ItemKey, PrismError]:
        """Drop what the plan drops, then its encoder work, items at the same blocks together. Returns failures."""
        for key in plan.drop_features:
            self.features.pop(key, None)
            self.encoding.pop(key, None)
        for key in plan.drop_staged:
            self.staged.pop(key, None)
            self.encoding.pop(key, None)
        failed: dict[ItemKey, PrismError] = {}
        batches: dict[tuple[int, int], list[EncodeWork]] = {}
        for work in plan.encode:
            if work.first_block == 0:
                self.encoding[work.key] = self._begin(work.key)
            batches.setdefault((work.first_block, work.last_block), []).append(work)
        for (first, last), works in batches.items():
            for states, padded in self.graphs.batches([self.encoding[work.key] for work in works]):
                self._model.vision.advance(states, last - first, padded)
            for work in works:
                if work.finishes and (error := self._finish(work)) is not None:
                    failed[work.key] = error
        return failed

    def _begin(self, key: ItemKey) -> VisionState:
        item = self.staged[key]
        return self._model.vision.begin(item.pixels, item.grid)

    def _finish(self, work: EncodeWork) -> PrismError | None:
        features = self._model.vision.finish(self.encoding.pop(work.key))
        features = self.staged.pop(work.key).with_repeats(features)
        if features.num_tokens != work.num_tokens:
            return PrismError(f"the encoder gave {features.num_tokens} rows for a medium of {work.num_tokens} tokens")
        self.features[work.key] = features
        return None

    @staticmethod
    def append_rows(media: tuple[MediaRows, ...], packet: Packet) -> Section | None:
        """The numbers of the step's media rows, put into its packet."""
        if not media:
            return None
        return packet.append(np.concatenate([np.arange(part.row, part.row + part.count) for part in media]))

    def feature_rows(self, media: tuple[MediaRows, ...], rows: Tensor) -> FeatureRows:
        """The features of the step's media rows, gathered in row order, every DeepStack level alike."""
        levels: list[list[Tensor]] = []
        for part in _joined(media):
            features = self.features.get(part.key)
            if features is None:  # its encoding failed: the request fails, its rows only have to be something
                config, depth = self._model.config, 1 + len(self._model.config.vision.deepstack_blocks)
                shape = (part.count, config.text.hidden_size)
                levels.append([torch.zeros(shape, dtype=self._model.dtype, device=self._device)] * depth)
            else:
                span = slice(part.offset, part.offset + part.count)
                levels.append([level[span] for level in (features.main, *features.deepstack)])
        main, *deepstack = (torch.cat(parts) for parts in zip(*levels, strict=True))
        return FeatureRows(rows, main, tuple(deepstack))


def _joined(media: tuple[MediaRows, ...]) -> list[MediaRows]:
    """Parts whose features follow each other as one: a clip's frames have text between their rows, but not there."""
    joined: list[MediaRows] = []
    for part in media:
        last = joined[-1] if joined else None
        if last is not None and last.key == part.key and last.offset + last.count == part.offset:
            joined[-1] = replace(last, count=last.count + part.count)
        else:
            joined.append(part)
    return joined

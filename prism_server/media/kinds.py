"""The kinds of media that Prism serves. A new kind is one more class here, entered in the pipeline's registry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache

from prism_server.errors import BadRequest
from prism_server.identity import Digest, layout_digest
from prism_server.media import image, qwen
from prism_server.media.item import IsWanted, ItemFacts, ItemKey, MediaItem, Patches
from prism_server.media.limits import MediaLimits
from prism_server.media.processor_config import ImageProcessorConfig, PixelRange

REMEMBERED_LAYOUTS = 1024


class MediaKind(ABC):
    """What a kind of media must know. Any thread calls it; any method may raise BadRequest with the item's param."""

    name: str
    """`MediaItem.kind` of its items."""

    @abstractmethod
    def layout(self, item: MediaItem) -> Digest:
        """Digest of how the item will be shown. From its options alone: on the path of every known item."""

    @abstractmethod
    def describe(self, item: MediaItem, key: ItemKey) -> ItemFacts:
        """Facts of an item from its header or index; never a full decode. Changes nothing."""

    @abstractmethod
    def prepare(self, item: MediaItem, facts: ItemFacts, is_wanted: IsWanted) -> Patches:
        """Decodes and cuts the item: `facts.grid`'s patches. Runs on a worker.

        What takes longer than a picture asks `is_wanted` in between, and raises Unwanted.
        """


class ImageKind(MediaKind):
    """Still pictures; of an animation its first frame."""

    name = "image"

    def __init__(self, config: ImageProcessorConfig, limits: MediaLimits) -> None:
        self._config = config
        self._limits = limits
        self._layout_of = lru_cache(maxsize=REMEMBERED_LAYOUTS)(self._compute_layout)

    def layout(self, item: MediaItem) -> Digest:
        return self._layout_of(self._config.pixels_for(item.options, item.param))

    def describe(self, item: MediaItem, key: ItemKey) -> ItemFacts:
        header = image.read_header(item.data, self._limits, item.param)
        pixels = self._config.pixels_for(item.options, item.param)
        grid = qwen.picture_grid(header.width, header.height, self._config, pixels)
        num_tokens = grid[0] * grid[1] * grid[2] // self._config.merge_size**2
        return ItemFacts(key, self.name, grid, num_tokens, header.width, header.height)

    def prepare(self, item: MediaItem, facts: ItemFacts, is_wanted: IsWanted) -> Patches:
        picture = image.decode(item.data, self._limits, item.param)
        if picture.size != (facts.width, facts.height):
            raise BadRequest("the bytes are not those that the facts were taken from", item.param)
        return qwen.picture_patches(picture, facts.grid, self._config)

    def _compute_layout(self, pixels: PixelRange) -> Digest:
        """The fingerprint covers patch, merge, frames and normalisation; the rest is what may differ by request."""
        return layout_digest(
            self.name,
            {
                "processor": self._config.fingerprint,
                "patch_size": self._config.patch_size,
                "merge_size": self._config.merge_size,
                "min_pixels": pixels.min_pixels,
                "max_pixels": pixels.max_pixels,
                "resample": "bicubic",
                "background": "white",
            },
        )

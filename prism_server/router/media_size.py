"""How much work a medium is, from its header: tokens and patches. Remembered by content."""

from __future__ import annotations

from dataclasses import dataclass

from prism_server.errors import BadRequest
from prism_server.identity import Digest, MediaOptions
from prism_server.media.facts_table import FactsTable
from prism_server.media.item import ItemKey, MediaItem
from prism_server.media.kinds import ImageKind
from prism_server.media.limits import MediaLimits
from prism_server.media.processor_config import ImageProcessorConfig, PixelRange

UNLIMITED = MediaLimits(max_items=1 << 20, max_item_bytes=1 << 40, max_decoded_pixels=1 << 40)
"""What is too large, a pod says; here it only has to have a size."""

QWEN3_VL = ImageProcessorConfig(
    patch_size=16,
    temporal_patch_size=2,
    merge_size=2,
    pixels=PixelRange(65_536, 4096 * 32 * 32),
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
)
"""The released models' pictures, under the server's default limit of 4,096 tokens. Only sizes matter here."""


@dataclass(frozen=True, slots=True)
class MediaSize:
    """Placeholder tokens of a medium in the prompt, and patches that the vision encoder reads for it."""

    num_tokens: int
    num_patches: int


USUAL = MediaSize(num_tokens=1024, num_patches=4096)
"""A picture of a megapixel: taken for what has no readable header, and for links."""


class MediaSizer:
    """Sizes of media, those of the last `capacity_items` remembered. Any thread may call it."""

    def __init__(self, config: ImageProcessorConfig = QWEN3_VL, capacity_items: int = 200_000) -> None:
        self._images = ImageKind(config, UNLIMITED)
        self._facts = FactsTable(capacity_items)

    def size(self, kind: str, content: Digest, data: bytes, options: MediaOptions) -> MediaSize:
        """The medium's size; `USUAL` where its header cannot be read (the pod will say what is wrong with it)."""
        if kind != self._images.name:
            return USUAL
        item = MediaItem(kind, data, options)
        try:
            key = ItemKey(content, self._images.layout(item))
            facts = self._facts.get(key)
            if facts is None:
                if not data:
                    return USUAL
                facts = self._images.describe(item, key)
                self._facts.put(facts)
        except BadRequest:
            return USUAL
        return MediaSize(facts.num_tokens, facts.num_patches)

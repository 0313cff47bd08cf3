"""How much work a medium is, from its header: tokens and patches. Remembered by content."""

from __future__ import annotations

import math
from dataclasses import dataclass

from prism_server.errors import BadRequest
from prism_server.identity import Digest
from prism_server.media.clip_plan import fit_clip
from prism_server.media.facts_table import FactsTable
from prism_server.media.image import read_header
from prism_server.media.item import ItemKey, MediaItem
from prism_server.media.kinds import ImageKind
from prism_server.media.limits import MediaLimits
from prism_server.media.processor_config import ImageProcessorConfig, PixelRange
from prism_server.media.sampling import Sampling
from prism_server.media.video_config import VideoProcessorConfig

UNLIMITED = MediaLimits(
    max_items=1 << 20, max_item_bytes=1 << 40, max_decoded_pixels=1 << 40, max_listed_frames=1 << 20
)
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


QWEN3_VL_CLIPS = VideoProcessorConfig(
    patch_size=16,
    temporal_patch_size=2,
    merge_size=2,
    pixels=PixelRange(4096, 25_165_824),
    sampling=Sampling(2.0, 4, 768),
    max_tokens=12_288,
)
BYTES_OF_A_CLIP_TOKEN, LEAST_CLIP_TOKENS = 256, 256
"""Half a minute of an H.264 clip for the web has 2 to 4 MB and, at two frames a second, about 10,000 tokens."""

USUAL = MediaSize(num_tokens=1024, num_patches=4096)
"""A picture of a megapixel: taken for what has no readable header, and for links."""


class MediaSizer:
    """Sizes of media, those of the last `capacity_items` remembered. Any thread may call it."""

    def __init__(
        self,
        config: ImageProcessorConfig = QWEN3_VL,
        capacity_items: int = 200_000,
        clips: VideoProcessorConfig = QWEN3_VL_CLIPS,
    ) -> None:
        self._images = ImageKind(config, UNLIMITED)
        self._clips = clips
        self._patches_of_a_token = config.merge_size**2
        self._facts = FactsTable(capacity_items)

    def size(self, item: MediaItem, content: Digest) -> MediaSize:
        """The medium's size; `USUAL` where its header cannot be read (the pod will say what is wrong with it).

        That of a clip is a guess: its frames need a decoder.
        """
        try:
            return self._clip(item) if item.kind == "video" else self._picture(item, content)
        except BadRequest:
            return USUAL

    def _picture(self, item: MediaItem, content: Digest) -> MediaSize:
        key = ItemKey(content, self._images.layout(item))
        facts = self._facts.get(key)
        if facts is None:
            if not item.data:
                return USUAL
            facts = self._images.describe(item, key)
            self._facts.put(facts)
        return MediaSize(facts.num_tokens, facts.num_patches)

    def _clip(self, item: MediaItem) -> MediaSize:
        """A list by its first frame, a file by its bytes."""
        if not item.num_bytes:
            return USUAL
        if not item.frames:
            guess = min(max(len(item.data) // BYTES_OF_A_CLIP_TOKEN, LEAST_CLIP_TOKENS), self._clips.max_tokens)
            return MediaSize(guess, guess * self._patches_of_a_token)
        header = read_header(item.frames[0], UNLIMITED, item.param)
        counts = self._clips.sampling_for(item.options, item.param)
        pixels = self._clips.pixels_for(item.options, item.param)
        num_frames = min(len(item.frames), counts.max_frames)
        fit = fit_clip(num_frames, counts.min_frames, header.height, header.width, self._clips, pixels, item.param)
        num_patches = math.prod(fit.grid)
        return MediaSize(num_patches // self._patches_of_a_token, num_patches)

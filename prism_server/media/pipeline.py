"""Media on their way to the model: `describe` says what an item is, `materialise` prepares its pixels, once for all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from prism_server.errors import BadRequest, EngineFault, PrismError
from prism_server.identity import Digest, framed_digest
from prism_server.media.cache import CacheStats, Materialised, PatchCache, media_failed
from prism_server.media.clip_kind import VideoKind
from prism_server.media.facts_table import FactsStats, FactsTable
from prism_server.media.item import ItemFacts, ItemKey, MediaItem
from prism_server.media.kinds import ImageKind, MediaKind
from prism_server.media.limits import MediaLimits, media_limits
from prism_server.media.processor_config import ImageProcessorConfig, load_image_processor
from prism_server.media.video_config import VideoProcessorConfig, load_video_processor
from prism_server.settings import MediaSettings

MOST_DEFAULT_WORKERS = 8
MOST_HASHING_THREADS = 4
LEAST_PARALLEL_BYTES = 4 << 20
"""Media of one request below this are hashed where they are, in two milliseconds: each one that another thread hashes
costs two hand-overs of Python's lock, for which the engine's thread waits too.
"""


@dataclass(frozen=True, slots=True)
class MediaStats:
    """A snapshot of the counters."""

    cache: CacheStats
    facts: FactsStats

    @property
    def decoded_items(self) -> int:
        """Media decoded and cut since the start."""
        return self.cache.prepared


class MediaPipeline:
    """From encoded bytes to facts and patches. Any thread may call it.

    `config`: the checkpoint's picture processor; `workers`: decoding threads, 0 for one a core up to 8; `cache_bytes`:
    capacity for prepared patches; `facts_items`: media whose facts are remembered; `video`: the checkpoint's clip
    processor, None for one that shows no clips; `share_repeats`: see `VideoKind`.
    """

    def __init__(
        self,
        config: ImageProcessorConfig,
        limits: MediaLimits,
        workers: int,
        cache_bytes: int,
        facts_items: int,
        video: VideoProcessorConfig | None = None,
        share_repeats: bool = False,
    ) -> None:
        self.config = config
        self.video = video
        self.limits = limits
        kinds: list[MediaKind] = [ImageKind(config, limits)]
        if video is not None:
            kinds.append(VideoKind(video, limits, share_repeats))
        self._kinds: Mapping[str, MediaKind] = {kind.name: kind for kind in kinds}
        self._facts = FactsTable(facts_items)
        self._cache = PatchCache(cache_bytes)
        self._closed = False
        num_workers = workers or min(os.cpu_count() or 1, MOST_DEFAULT_WORKERS)
        self._workers = ThreadPoolExecutor(num_workers, thread_name_prefix="prism-media")
        num_hashers = min(os.cpu_count() or 1, MOST_HASHING_THREADS)  # its own threads: decoding must not delay it
        self._hashers = ThreadPoolExecutor(num_hashers, thread_name_prefix="prism-hash")

    @classmethod
    def from_settings(cls, settings: MediaSettings, checkpoint: Path) -> MediaPipeline:
        """The pipeline of a checkpoint directory. Raises StartupError where its picture processor is missing or odd."""
        config = load_image_processor(checkpoint, settings.max_image_tokens)
        video = load_video_processor(checkpoint, config, settings.max_video_tokens)
        limits = media_limits(settings)
        return cls(
            config,
            limits,
            settings.workers,
            settings.cache_bytes,
            settings.facts_items,
            video,
            settings.share_repeated_frames,
        )

    @property
    def fingerprint(self) -> str:
        """64 hex digits over how every kind of media is shown."""
        clips = None if self.video is None else self.video.fingerprint
        return framed_digest("media-processors", (self.config.fingerprint, clips)).hex()

    def describe(self, item: MediaItem) -> ItemFacts:
        """The item's facts: remembered ones (a digest and a look-up), else from its header. Raises BadRequest.

        A sound header is enough: bytes that are cut off later fail in `materialise`.
        """
        self._check(item)
        return self._describe(item, item.content_id)

    def describe_all(self, items: Sequence[MediaItem]) -> list[ItemFacts]:
        """The facts of one request's items, in order. Large ones are hashed side by side. Raises BadRequest."""
        for item in items:
            self._check(item)
        hashed: Iterable[Digest] = map(_content_id_of, items)
        if len(items) > 1 and sum(item.num_bytes for item in items) >= LEAST_PARALLEL_BYTES:
            hashed = self._hashers.map(_content_id_of, items)
        return list(map(self._describe, items, hashed))

    def _check(self, item: MediaItem) -> None:
        self._kind_of(item)
        if not all(item.frames or (item.data,)):
            raise BadRequest("the medium is empty (0 bytes)", item.param)
        self.limits.check_item_bytes(item.num_bytes, item.param)

    def _describe(self, item: MediaItem, content: Digest) -> ItemFacts:
        kind = self._kind_of(item)
        key = ItemKey(content, kind.layout(item))
        facts = self._facts.get(key)
        if facts is None:
            try:
                facts = kind.describe(item, key)
            except PrismError:
                raise
            except Exception as error:
                raise media_failed(key, error, item.param) from error
            self._facts.put(facts)
        return facts

    def materialise(self, item: MediaItem, facts: ItemFacts) -> Future[Materialised]:
        """The patches of a described item, from the cache or from a worker; never blocks.

        The future may fail with BadRequest (the bytes cannot be decoded) or EngineFault (`close` came first). It may be
        cancelled at any time; nobody else loses by that, and when nobody else waits, a clip's worker is free again
        within some frames.
        """
        if self._closed:
            raise EngineFault("the server is stopping; no media are prepared any more")
        kind = self._kind_of(item)
        prepare = partial(kind.prepare, item, facts)
        return self._cache.fetch(facts.key, prepare, self._workers, item.param)

    def hand_to_worker(self, work: Callable[[], None]) -> None:
        """Have it done behind what the workers have to do already; not after `close`. What it raises is lost."""
        self._workers.submit(work)

    def stats(self) -> MediaStats:
        return MediaStats(self._cache.stats(), self._facts.stats())

    def close(self) -> None:
        """Finishes what runs, fails what is queued, ends the workers. Called once the engine has stopped asking."""
        self._closed = True
        self._workers.shutdown(wait=True, cancel_futures=True)
        self._hashers.shutdown(wait=True)

    def _kind_of(self, item: MediaItem) -> MediaKind:
        kind = self._kinds.get(item.kind)
        if kind is None:
            known = ", ".join(self._kinds)
            raise BadRequest(f"media of kind {item.kind!r} are not served; known: {known}", item.param)
        return kind


def _content_id_of(item: MediaItem) -> Digest:
    return item.content_id

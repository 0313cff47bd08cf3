"""Who is who: content ids, layout digests, namespaces and the two chains. One implementation for router and engine.

Nothing here needs torch, a tokenizer or a picture decoder.
"""

from prism_server.identity.chains import (
    ChainPart,
    MediaPart,
    PageSpan,
    TextPart,
    cache_seed,
    media_chain_keys,
    namespace_digest,
    page_key,
)
from prism_server.identity.digest import KEY_VERSION, Digest, framed_digest
from prism_server.identity.media import LinkContent, MediaOptions, content_id, frames_id, layout_digest, link_digest

__all__ = [
    "KEY_VERSION",
    "ChainPart",
    "Digest",
    "LinkContent",
    "MediaOptions",
    "MediaPart",
    "PageSpan",
    "TextPart",
    "cache_seed",
    "content_id",
    "framed_digest",
    "frames_id",
    "layout_digest",
    "link_digest",
    "media_chain_keys",
    "namespace_digest",
    "page_key",
]

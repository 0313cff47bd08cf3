"""What the engine reports of its caches to whoever follows them."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

from prism_server.engine.owner import Owner
from prism_server.identity import content_id
from prism_server.media.item import ItemKey


def test_a_content_held_in_two_layouts_is_evicted_when_the_last_one_goes() -> None:
    content = content_id("image", b"one")
    wide, narrow = ItemKey(content, b"wide"), ItemKey(content, b"narrow")
    owner = SimpleNamespace(_held_contents=Counter())
    changes = lambda completed, dropped: Owner._content_changes(owner, completed, dropped)  # type: ignore[arg-type] # noqa: E731
    assert changes([wide, narrow], []) == ((content,), ())
    assert changes([], [wide]) == ((), ())
    assert changes([], [narrow]) == ((), (content,))
    assert changes([wide], [wide]) == ((), ())
    assert not owner._held_contents

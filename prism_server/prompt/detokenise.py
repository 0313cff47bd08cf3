"""From sampled ids to text, a token at a time: whole characters only, and nothing of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from functools import lru_cache

from prism_server.prompt.tokenizer import Tokenizer

REMEMBERED_STOPS = 64
"""Stop strings whose tables are kept: all samples of a request share them, and so does who asks the same again."""


class IncrementalDetokeniser:
    """Ids in, complete characters out. The work per token does not depend on what came before.

    Tokens are bytes, so a UTF-8 decoder with a memory of at most three bytes is all the state there is. Bytes that can
    no longer become a character come out as U+FFFD, the same ones as when everything is decoded at once.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_inside_character = False

    def push(self, token_id: int) -> str:
        """Text that this token completes, often the token's own, sometimes none."""
        if token_id in self._skipped:
            return ""
        if not self._is_inside_character:
            text = self._tokenizer.token_text(token_id)
            if text is not None:
                return text
        text = self._decoder.decode(self._tokenizer.token_bytes(token_id))
        self._is_inside_character = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """U+FFFD when the last character was never completed, else nothing. The detokeniser is as new afterwards."""
        self._is_inside_character = False
        return self._decoder.decode(b"", final=True)


class StopMatcher:
    """Finds the stop string that is complete first, however the text is cut, and holds back what may begin one.

    One Knuth-Morris-Pratt automaton for each stop string: its state is the length of the longest beginning of the stop
    string that the text ends with, so the largest state is exactly what must be held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(stops)
        self._fallbacks = [_fallbacks(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text. Whatever comes after it is dropped."""

    def push(self, text: str) -> str:
        """Text that is certainly not part of a stop string. At a match, what comes before the stop string."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        held, self._held = self._held + text, ""
        start = len(held) - len(text)
        for i, character in enumerate(text, start + 1):
            stop = self._advance(character)
            if stop is not None:
                self.matched = stop
                return held[: i - len(stop)]
        keep = len(held) - max(self._states)
        self._held = held[keep:]
        return held[:keep]

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return held

    def _advance(self, character: str) -> str | None:
        """One more character. Of stop strings that it completes together the longest counts: it began first."""
        complete: list[str] = []
        for i, (stop, fallbacks) in enumerate(zip(self._stops, self._fallbacks, strict=True)):
            state = self._states[i]
            while state and stop[state] != character:
                state = fallbacks[state]
            state += stop[state] == character
            self._states[i] = state
            if state == len(stop):
                complete.append(stop)
        return max(complete, key=len, default=None)


class SampleText:
    """The text of one sample: what the engine sends, in pieces that add up to the whole for every way to cut it."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), skip_special: bool = True) -> None:
        self._detokeniser = IncrementalDetokeniser(tokenizer, skip_special)
        self._matcher = StopMatcher(stops)
        self._has_stops = bool(stops)

    def push(self, token_ids: Iterable[int], match_stops: bool = True) -> tuple[str, str | None]:
        """Text that is ready, and the stop string that has matched, if one has. Later tokens then add nothing.

        Tokens that are pushed without `match_stops` (below a request's `min_tokens`) begin no stop string.
        """
        text = "".join(map(self._detokeniser.push, token_ids))
        if not match_stops or not self._has_stops:
            return text, None
        return self._matcher.push(text), self._matcher.matched

    def flush(self) -> str:
        """The rest, once the sample has ended for another reason than a stop string; after a match it is empty."""
        text = self._matcher.push(self._detokeniser.flush())
        return text + self._matcher.flush()


@lru_cache(REMEMBERED_STOPS)
def _fallbacks(stop: str) -> tuple[int, ...]:
    """`fallbacks[k]`: the longest proper beginning of `stop` that `stop[:k]` also ends with."""
    fallbacks = [0] * (len(stop) + 1)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[length] != stop[i]:
            length = fallbacks[length]
        length += stop[length] == stop[i]
        fallbacks[i + 1] = length
    return tuple(fallbacks)

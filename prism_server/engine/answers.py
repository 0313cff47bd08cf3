"""From the scheduler's outcomes to the events of a request: text, ends, usage, timings. Owner thread only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from prism_server.engine.messages import (
    Accepted,
    Event,
    GenerateRequest,
    RequestFailed,
    RequestFinished,
    SampleFinished,
    Timings,
    TokenDelta,
    Usage,
)
from prism_server.engine.outcomes import Admitted, Drawn, Finished, Outcome
from prism_server.engine.scheduler import Scheduler
from prism_server.engine.sequence import Sequence
from prism_server.errors import PrismError
from prism_server.prompt.detokenise import SampleText
from prism_server.prompt.tokenizer import Tokenizer


@dataclass(slots=True)
class Answer:
    """A live request: its samples, their text, and whether its last event is out."""

    request: GenerateRequest
    sequences: list[Sequence]
    texts: list[SampleText]
    unfinished: int
    stops: dict[int, str] = field(default_factory=dict)
    """Samples in whose text a stop string is complete."""
    accepted: bool = False
    error: PrismError | None = None


class Answers:
    """Every live request by its id."""

    def __init__(self, tokenizer: Tokenizer, scheduler: Scheduler, on_end: Callable[[GenerateRequest], None]) -> None:
        self._tokenizer = tokenizer
        self._scheduler = scheduler
        self._on_end = on_end
        self._live: dict[str, Answer] = {}

    def __len__(self) -> int:
        return len(self._live)

    def open(self, request: GenerateRequest, sequences: list[Sequence]) -> None:
        texts = [SampleText(self._tokenizer, request.params.stop) for _ in sequences]
        self._live[request.request_id] = Answer(request, sequences, texts, len(sequences))

    def close(self, request_id: str) -> None:
        """The request was refused before it ran."""
        self._on_end(self._live.pop(request_id).request)

    def sequences_of(self, request_id: str) -> list[Sequence]:
        """The samples of a live request; none when it has ended."""
        answer = self._live.get(request_id)
        return [] if answer is None else answer.sequences

    def past_deadline(self, now_s: float) -> list[Sequence]:
        late: list[Sequence] = []
        for answer in self._live.values():
            deadline_s = answer.request.deadline_s
            if deadline_s is not None and now_s > deadline_s:
                late += answer.sequences
        return late

    def take_events(self, now_s: float) -> list[Event]:
        """Everything that the scheduler has reported since the last call; stop strings end their sequences here."""
        events: list[Event] = []
        while outcomes := self._scheduler.take_outcomes():
            for outcome in outcomes:
                self._turn(outcome, now_s, events)
        return events

    def fail_all(self, error: PrismError) -> list[Event]:
        """The engine is done for: the last event of every live request."""
        failed: list[Event] = [RequestFailed(request_id, error) for request_id in self._live]
        for answer in tuple(self._live.values()):
            self._on_end(answer.request)
        self._live.clear()
        return failed

    def _turn(self, outcome: Outcome, now_s: float, events: list[Event]) -> None:
        answer = self._live.get(outcome.sequence.request.request_id)
        if answer is None:
            return
        if isinstance(outcome, Drawn):
            self._draw(answer, outcome, events)
        elif isinstance(outcome, Admitted):
            if not answer.accepted:
                answer.accepted = True
                events.append(Accepted(answer.request.request_id, usage_of(answer.sequences[:1])))
        else:
            self._finish(answer, outcome, now_s, events)

    def _draw(self, answer: Answer, drawn: Drawn, events: list[Event]) -> None:
        sequence = drawn.sequence
        may_stop = sequence.num_reported + 1 >= answer.request.params.min_tokens
        text, stop = answer.texts[sequence.sample].push((drawn.token_id,), match_stops=may_stop)
        sequence.num_reported += 1
        logprobs = () if drawn.logprob is None else (drawn.logprob,)
        events.append(TokenDelta(answer.request.request_id, sequence.sample, (drawn.token_id,), text, logprobs))
        if stop is not None:
            answer.stops[sequence.sample] = stop
            self._scheduler.end(sequence, "stop", stop_reason=stop)

    def _finish(self, answer: Answer, finished: Finished, now_s: float, events: list[Event]) -> None:
        request_id, sample = answer.request.request_id, finished.sequence.sample
        answer.unfinished -= 1
        if finished.error is not None:
            if answer.error is None:
                answer.error = finished.error
                for other in answer.sequences:
                    self._scheduler.end(other, "cancelled")
        elif answer.error is None:
            rest = answer.texts[sample].flush()
            if rest:
                events.append(TokenDelta(request_id, sample, (), rest))
            reason, stop_reason = finished.reason, finished.stop_reason
            if reason == "length" and sample in answer.stops:  # the last token that it might have completes it
                reason, stop_reason = "stop", answer.stops[sample]
            events.append(SampleFinished(request_id, sample, reason, stop_reason))
        if answer.unfinished == 0:
            del self._live[request_id]
            self._on_end(answer.request)
            events.append(_last_event(answer, now_s))


def _last_event(answer: Answer, now_s: float) -> Event:
    request_id = answer.request.request_id
    if answer.error is not None:
        return RequestFailed(request_id, answer.error)
    return RequestFinished(request_id, usage_of(answer.sequences), timings_of(answer.sequences, now_s))


def usage_of(sequences: list[Sequence]) -> Usage:
    """Prompt counts are the first sample's (the others share its rows); work is summed over all."""
    first = sequences[0]
    clips = [span.facts.clip for span in first.spans if span.is_last and span.facts.clip is not None]
    return Usage(
        prompt_tokens=first.prompt_tokens,
        completion_tokens=sum(sequence.num_reported for sequence in sequences),
        cached_tokens=first.first_cached_tokens,
        cached_media_tokens=first.first_cached_media_tokens,
        prefilled_tokens=sum(sequence.prefilled_tokens for sequence in sequences),
        prefilled_media_tokens=sum(sequence.prefilled_media_tokens for sequence in sequences),
        decoded_items=sum(sequence.decoded_items for sequence in sequences),
        encoded_items=sum(sequence.encoded_items for sequence in sequences),
        clip_frames=sum(len(clip.frames) for clip in clips),
        lowered_clips=sum(clip.lowered for clip in clips),
    )


def timings_of(sequences: list[Sequence], now_s: float) -> Timings:
    """Of the sample that came first; a phase that was not reached counts up to now."""
    first = min(sequences, key=lambda sequence: sequence.first_token_s or now_s)
    arrival_s = first.request.arrival_s
    admitted_s = first.admitted_s if first.admitted_s is not None else now_s
    ready_s = max(admitted_s, first.media_ready_s or admitted_s)
    token_s = first.first_token_s if first.first_token_s is not None else now_s
    prefill_ms = max(0.0, token_s - ready_s) * 1e3
    return Timings(
        queue_ms=(admitted_s - arrival_s) * 1e3,
        media_ms=(ready_s - admitted_s) * 1e3,
        prefill_ms=prefill_ms,
        encode_ms=min(first.encode_ms, prefill_ms),
        first_token_ms=(token_s - arrival_s) * 1e3,
        total_ms=(now_s - arrival_s) * 1e3,
    )

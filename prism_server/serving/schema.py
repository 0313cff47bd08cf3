"""What a request may say: one struct an endpoint, checked by type; fields nobody knows are named, not refused.

Defaults: the OpenAI endpoints sample at temperature 1 as OpenAI's clients expect, the native one is greedy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from prism_server.engine.messages import MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS, MAX_TOP_LOGPROBS, SamplingParams
from prism_server.errors import BadRequest

VALIDATION = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)
MISSING = re.compile(r"^Object missing required field `(?P<field>.*)`$")
StopStrings = Annotated[list[str], msgspec.Meta(max_length=MAX_STOP_STRINGS)]
StopTokenIds = Annotated[list[int], msgspec.Meta(max_length=MAX_STOP_TOKEN_IDS)]
MAX_COMMAS = 1_000_000
"""In the JSON of a body, its media aside, so that it has no more values than that either. Nothing else runs in the
process while JSON is parsed: a tenth of a second for a million lists."""
COUNTED_BYTES = 1 << 20
"""At a time: other threads run in between."""


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class GenerationFields(msgspec.Struct, frozen=True, kw_only=True):
    """What every endpoint takes. `null` is the same as absent."""

    model: str | None = None
    stream: bool | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | StopStrings | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    # beyond OpenAI's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: StopTokenIds | None = None
    cache_salt: str | None = None

    def token_limit(self) -> int | None:
        """Most tokens of the answer, if the request says so."""
        return self.max_tokens

    def alternatives(self) -> int | None:
        """How many logprobs to report beside the chosen token's; None for none at all."""
        return None

    def sampling(self, max_tokens: int, default_temperature: float) -> SamplingParams:
        """Raises BadRequest with the field's name for a value out of its range."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=_or(self.min_tokens, 0),
            temperature=_or(self.temperature, default_temperature),
            top_k=0 if self.top_k == -1 else _or(self.top_k, 0),  # -1 is another spelling of "off"
            top_p=_or(self.top_p, 1.0),
            min_p=_or(self.min_p, 0.0),
            repetition_penalty=_or(self.repetition_penalty, 1.0),
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            seed=self.seed,
            stop=tuple(stop),
            stop_token_ids=frozenset(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logprobs=self.alternatives(),
            n=_or(self.n, 1),
        )


class ChatRequest(GenerationFields, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[Any]
    max_completion_tokens: int | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def alternatives(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        return _or(self.top_logprobs, 0) if self.logprobs else None


class CompletionRequest(GenerationFields, frozen=True, kw_only=True):
    """`POST /v1/completions`: text only, one prompt."""

    prompt: str | list[str | int]
    stream_options: StreamOptions | None = None
    logprobs: int | None = None

    def alternatives(self) -> int | None:
        return _checked_logprobs(self.logprobs)

    def one_prompt(self) -> str | list[int]:
        """Text or token ids. OpenAI's batch of prompts is refused: it is the same as several requests."""
        if isinstance(self.prompt, str):
            return self.prompt
        ids = [part for part in self.prompt if isinstance(part, int)]
        if len(ids) == len(self.prompt):
            return ids
        if len(self.prompt) == 1 and isinstance(self.prompt[0], str):
            return self.prompt[0]
        raise BadRequest("one prompt a request is supported; send several requests", param="prompt")


class GenerateBody(GenerationFields, frozen=True, kw_only=True):
    """`POST /v1/generate`: `messages` as in a chat, or `prompt` as plain text. Streams unless `stream` is false."""

    messages: list[Any] | None = None
    prompt: str | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if (self.messages is None) == (self.prompt is None):
            raise BadRequest("give either messages or prompt", param="messages")

    def alternatives(self) -> int | None:
        return _checked_logprobs(self.logprobs)


def _checked_logprobs(count: int | None) -> int | None:
    if count is not None and not 0 <= count <= MAX_TOP_LOGPROBS:
        raise BadRequest(f"logprobs must lie between 0 and {MAX_TOP_LOGPROBS}", param="logprobs")
    return count


Value = TypeVar("Value")
Fields = TypeVar("Fields", bound=GenerationFields)


def _or(value: Value | None, default: Value) -> Value:
    return default if value is None else value


# Fields whose silent loss would make the answer another one than asked for, and the values that ask for nothing.
HARMLESS: Mapping[str, Callable[[Any], bool]] = {
    "tools": lambda v: not v,
    "functions": lambda v: not v,
    "tool_choice": lambda v: v in ("none", "auto"),
    "function_call": lambda v: v in ("none", "auto"),
    "response_format": lambda v: v == {"type": "text"},
    "logit_bias": lambda v: not v,
    "audio": lambda v: not v,
    "modalities": lambda v: v in ([], ["text"]),
    "web_search_options": lambda v: False,
    "best_of": lambda v: v == 1,
    "echo": lambda v: v is False,
    "suffix": lambda v: v == "",
    "continue_final_message": lambda v: v is False,
    "chat_template": lambda v: False,
    "guided_json": lambda v: False,
    "guided_regex": lambda v: False,
    "guided_choice": lambda v: False,
    "guided_grammar": lambda v: False,
    "structured_outputs": lambda v: False,
}


@dataclass(frozen=True, slots=True)
class Parsed(Generic[Fields]):
    fields: Fields
    unknown: tuple[str, ...]
    """Top-level names that no rule knows."""


def parse_body(body: bytes | bytearray, kind: type[Fields]) -> Parsed[Fields]:
    """JSON to fields. BadRequest names the field: not JSON, not an object, a wrong type, something not supported."""
    if sum(body.count(b",", at, at + COUNTED_BYTES) for at in range(0, len(body), COUNTED_BYTES)) > MAX_COMMAS:
        reason = f"the body has more than {MAX_COMMAS} commas, the most that this server reads"
        raise BadRequest(reason, status=413, code="body_too_large")
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(document, dict):
        raise BadRequest("the body must be a JSON object", code="invalid_json")
    for name, is_harmless in HARMLESS.items():
        value = document.get(name)
        if value is not None and not is_harmless(value):
            raise BadRequest(f"{name} is not supported", param=name, code="unsupported_parameter")
    try:
        fields = msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        raise _bad_field(str(error)) from error
    known = set(kind.__struct_fields__) | HARMLESS.keys()
    return Parsed(fields, tuple(name for name in document if name not in known))


def _bad_field(message: str) -> BadRequest:
    """From msgspec's wording to ours: which field, what was wrong with it."""
    matched = VALIDATION.match(message)
    what, path = (matched["what"], matched["path"]) if matched else (message, None)
    missing = MISSING.match(what)
    if missing:
        name = f"{path}.{missing['field']}" if path else missing["field"]
        return BadRequest(f"{name} is required", param=name)
    return BadRequest(f"{path or 'the body'}: {what[:1].lower()}{what[1:]}", param=path)

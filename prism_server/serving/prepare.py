"""From a parsed body to a `GenerateRequest`: media described, prompt encoded and keyed. For worker threads."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prism_server.engine.messages import GenerateRequest, SamplingParams
from prism_server.errors import BadRequest
from prism_server.media.item import MediaItem
from prism_server.media.link import NamedLink
from prism_server.prompt.encoded import EncodedPrompt
from prism_server.serving.early_media import EarlyMedia
from prism_server.serving.request_parts import read_messages
from prism_server.serving.schema import GenerationFields
from prism_server.settings import ServerSettings

if TYPE_CHECKING:
    from prism_server.engine.engine import Engine  # imports torch, long after the ports must answer

LONGEST_SHOWN_NAME = 200
"""Characters of a model's name in a refusal: a client may send megabytes."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A request that has been read and may name `links`; `finish`, blocking too, takes their bytes by URL."""

    links: tuple[NamedLink, ...]
    finish: Callable[[Mapping[str, bytes]], GenerateRequest]


@dataclass(frozen=True, slots=True)
class Preparer:
    """Blocking; safe from any thread. Every refusal is a BadRequest and leaves no trace in the engine."""

    engine: Engine
    settings: ServerSettings

    def chat(
        self,
        fields: GenerationFields,
        messages: Sequence[Any],
        early: EarlyMedia,
        default_temperature: float,
        arrival_s: float,
    ) -> Draft:
        """A conversation with its media, of which `early` ones have left the messages already."""
        self._check_model(fields)
        params = self._sampling(fields, default_temperature)  # refused before the costly part
        read = read_messages(messages, self.engine.media.limits, early, bool(self.settings.fetch.hosts))

        def finish(fetched: Mapping[str, bytes]) -> GenerateRequest:
            media = read.items(fetched)
            facts = self.engine.media.describe_all(media)
            prompt = self.engine.prompts.encode_chat(read.messages, facts, media, fields.cache_salt)
            return self._request(fields, prompt, media, params, arrival_s, "messages")

        return Draft(read.links, finish)

    def text(
        self, fields: GenerationFields, prompt_text: str | Sequence[int], default_temperature: float, arrival_s: float
    ) -> Draft:
        """Plain text or token ids, without a template."""
        self._check_model(fields)
        params = self._sampling(fields, default_temperature)

        def finish(_: Mapping[str, bytes]) -> GenerateRequest:
            prompt = self.engine.prompts.encode_text(prompt_text, fields.cache_salt)
            return self._request(fields, prompt, (), params, arrival_s, "prompt")

        return Draft((), finish)

    def _check_model(self, fields: GenerationFields) -> None:
        name = self.engine.info.model_name
        if fields.model is not None and fields.model != name:
            asked = fields.model[:LONGEST_SHOWN_NAME]
            reason = f"the model {asked!r} is not served here; this server has {name!r}"
            raise BadRequest(reason, param="model", status=404, code="model_not_found")

    def _sampling(self, fields: GenerationFields, default_temperature: float) -> SamplingParams:
        """With the most tokens there can be; the prompt's length takes its share off later."""
        limit, vocab_size = fields.token_limit(), self.engine.prompts.tokenizer.vocab_size
        params = fields.sampling(self.engine.info.max_context_tokens if limit is None else limit, default_temperature)
        if not all(token_id < vocab_size for token_id in params.stop_token_ids):
            raise BadRequest(f"stop_token_ids must lie in [0, {vocab_size})", param="stop_token_ids")
        return params

    def _request(
        self,
        fields: GenerationFields,
        prompt: EncodedPrompt,
        media: tuple[MediaItem, ...],
        params: SamplingParams,
        arrival_s: float,
        prompt_param: str,
    ) -> GenerateRequest:
        context, limit = self.engine.info.max_context_tokens, fields.token_limit()
        if len(prompt) >= context:
            raise BadRequest(
                f"the prompt has {len(prompt)} tokens; the context holds {context}, the answer included",
                param=prompt_param,
                code="context_length_exceeded",
            )
        if limit is None:
            params = dataclasses.replace(params, max_tokens=context - len(prompt))
        elif len(prompt) + limit > context:
            raise BadRequest(
                f"the prompt's {len(prompt)} tokens and max_tokens {limit} are {len(prompt) + limit} tokens; "
                f"the context holds {context}",
                param="max_tokens",
                code="context_length_exceeded",
            )
        deadline_s = arrival_s + self.settings.http.request_timeout_s
        return GenerateRequest(new_request_id(), prompt, media, params, arrival_s, deadline_s)


def new_request_id() -> str:
    return uuid.uuid4().hex

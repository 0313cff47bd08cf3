"""`/v1/chat/completions`, `/v1/completions` and `/v1/models`, as OpenAI's clients know them."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from prism_server.engine.messages import GenerateRequest
from prism_server.errors import BadRequest
from prism_server.prompt.tokenizer import Tokenizer
from prism_server.serving.early_media import EarlyMedia
from prism_server.serving.exchange import Exchange
from prism_server.serving.http_errors import json_response
from prism_server.serving.openai_format import AnswerFormat, ChatFormat, CompletionFormat, OpenAIStream
from prism_server.serving.prepare import Draft
from prism_server.serving.schema import ChatRequest, CompletionRequest
from prism_server.serving.services import Services

DEFAULT_TEMPERATURE = 1.0
"""OpenAI's. A client that wants the likeliest answer says 0."""


async def chat_completions(exchange: Exchange) -> None:
    """`POST /v1/chat/completions`."""

    def build(fields: ChatRequest, early: EarlyMedia) -> tuple[Delivery, Draft]:
        preparer = exchange.running.preparer
        draft = preparer.chat(fields, fields.messages, early, DEFAULT_TEMPERATURE, exchange.arrival_s)
        return Delivery.asked_for(fields), draft

    delivery, request = await exchange.prepared(ChatRequest, build)
    form = ChatFormat(f"chatcmpl-{request.request_id}", *_facts(exchange, request))
    await _answer(exchange, delivery, request, form)


async def completions(exchange: Exchange) -> None:
    """`POST /v1/completions`."""

    def build(fields: CompletionRequest, _: EarlyMedia) -> tuple[Delivery, Draft]:
        preparer = exchange.running.preparer
        draft = preparer.text(fields, fields.one_prompt(), DEFAULT_TEMPERATURE, exchange.arrival_s)
        return Delivery.asked_for(fields), draft

    delivery, request = await exchange.prepared(CompletionRequest, build)
    form = CompletionFormat(f"cmpl-{request.request_id}", *_facts(exchange, request))
    await _answer(exchange, delivery, request, form)


@dataclass(frozen=True, slots=True)
class Delivery:
    """How the answer is to be sent: all of the fields that outlives the preparation."""

    stream: bool
    include_usage: bool

    @classmethod
    def asked_for(cls, fields: ChatRequest | CompletionRequest) -> Delivery:
        options = fields.stream_options
        return cls(bool(fields.stream), options is not None and bool(options.include_usage))


def _facts(exchange: Exchange, request: GenerateRequest) -> tuple[str, Tokenizer, bool]:
    engine = exchange.running.engine
    return engine.info.model_name, engine.prompts.tokenizer, request.params.logprobs is not None


async def _answer(exchange: Exchange, delivery: Delivery, request: GenerateRequest, form: AnswerFormat) -> None:
    if delivery.stream:
        await exchange.send_stream(request, OpenAIStream(form, delivery.include_usage))
    else:
        collected = await exchange.collect(request)
        await exchange.send_whole(collected, lambda: form.whole(collected))


def model_routes(services: Services) -> list[Route]:
    """`GET /v1/models` and `GET /v1/models/{name}`."""

    def model() -> dict[str, object]:
        info = services.running().engine.info
        return {
            "id": info.model_name,
            "object": "model",
            "created": services.started_unix_s,
            "owned_by": "prism",
            "max_model_len": info.max_context_tokens,
        }

    async def list_models(_: Request) -> Response:
        return json_response({"object": "list", "data": [model()]})

    async def get_model(request: Request) -> Response:
        name = request.path_params["name"]
        if name != model()["id"]:
            raise BadRequest(f"the model {name!r} is not served here", "model", status=404, code="model_not_found")
        return json_response(model())

    return [Route("/v1/models", list_models), Route("/v1/models/{name:path}", get_model)]

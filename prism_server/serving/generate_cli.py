"""`prism-generate`: one request, offline, on the same engine. Text on stdout as it comes, or `--json` at the end."""

from __future__ import annotations

import queue
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from prism_server.cli_support import ArgumentParser, console_script
from prism_server.engine.messages import (
    CacheChanged,
    Event,
    GenerateRequest,
    RequestFailed,
    RequestFinished,
    SamplingParams,
    TokenDelta,
)
from prism_server.errors import BadRequest, StartupError
from prism_server.http.logs import log_to_stderr
from prism_server.media.item import MediaItem
from prism_server.media.messages import MediaContent, Message, TextContent
from prism_server.serving.answers import Collected, Sample
from prism_server.serving.native_api import whole_answer
from prism_server.settings_cli import add_setting_arguments, settings_from

if TYPE_CHECKING:
    from prism_server.engine.engine import Engine, Progress

REQUEST_ID = "prism-generate"
DEFAULT_MAX_TOKENS = 256


@console_script("prism-generate")
def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_strictly(argv)
    settings = settings_from(arguments)
    log_to_stderr("error")  # what a server says of itself is no part of an answer
    params = SamplingParams(arguments.max_tokens, temperature=arguments.temperature, seed=arguments.seed)
    media = tuple(_read(kind, path) for kind, path in arguments.media)

    from prism_server.engine.engine import Engine  # imports torch: not for --help or a wrong option

    engine = Engine.build(settings, _show_progress)
    try:
        request = _request(engine, media, arguments.question, params)
        collected = _run(engine, request, echo=not arguments.json)
    except BadRequest as error:  # say which file; the request's fields are those of this command
        raise StartupError(f"{error.param}: {error.reason}" if error.param else error.reason) from error
    finally:
        engine.stop()
    if arguments.json:
        print(msgspec.json.encode(whole_answer(REQUEST_ID, collected)).decode())
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser("prism-generate", "Ask a Qwen3-VL model one question, without a server.")
    parser.usage = "%(prog)s [--image FILE | --video FILE ...] [--json] [options of prism-serve] QUESTION"
    parser.add_argument("question", help="what to ask; the media come before it, in the order given")
    for kind, text in (("image", "a picture; repeatable"), ("video", "a clip (MP4, MOV, MKV, WebM, GIF); repeatable")):
        parser.add_argument(
            f"--{kind}", metavar="FILE", type=_OfKind(kind), action="append", dest="media", default=[], help=text
        )
    parser.add_argument("--json", action="store_true", help="print the answer, usage and timings as JSON")
    parser.add_argument(
        "--max-tokens", metavar="N", type=int, default=DEFAULT_MAX_TOKENS, help="[default: %(default)s]"
    )
    parser.add_argument("--temperature", metavar="X", type=float, default=0.0, help="0 is greedy [default: 0]")
    parser.add_argument("--seed", metavar="N", type=int, help="makes sampling repeat itself")
    add_setting_arguments(parser)
    return parser


@dataclass(frozen=True, slots=True)
class _OfKind:
    """A file named on the command line, with the kind of medium it is."""

    kind: str

    def __call__(self, path: str) -> tuple[str, Path]:
        return self.kind, Path(path)


def _read(kind: str, path: Path) -> MediaItem:
    try:
        return MediaItem(kind, path.read_bytes(), param=str(path))
    except OSError as error:
        raise StartupError(f"--{kind} {path}: cannot be read: {error.strerror}") from error


def _show_progress(progress: Progress) -> None:
    """One line that is written over; it is erased before the answer. Nothing where nobody looks on."""
    if sys.stderr.isatty():
        print(f"\r{progress.stage}\033[K\r", end="", file=sys.stderr, flush=True)


def _request(engine: Engine, media: tuple[MediaItem, ...], question: str, params: SamplingParams) -> GenerateRequest:
    facts = [engine.media.describe(item) for item in media]
    shown = tuple(MediaContent(i, item.kind) for i, item in enumerate(media))
    message = Message("user", (*shown, TextContent(question)))
    prompt = engine.prompts.encode_chat([message], facts, media, None)
    return GenerateRequest(REQUEST_ID, prompt, media, params, time.monotonic())


def _run(engine: Engine, request: GenerateRequest, echo: bool) -> Collected:
    collected = Collected([Sample()])
    for event in _events(engine, request):
        collected.take(event)
        if echo and isinstance(event, TokenDelta):
            print(event.text, end="", flush=True)
    if echo:
        print()
    return collected


def _events(engine: Engine, request: GenerateRequest) -> Iterator[Event]:
    """The request's events until its end. Raises the error of RequestFailed."""
    arrived: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def on_events(events: Sequence[Event]) -> None:
        for event in events:
            arrived.put(event)

    engine.start(on_events)
    engine.submit(request)
    while True:
        event = arrived.get()
        if isinstance(event, RequestFailed):
            raise event.error
        if not isinstance(event, CacheChanged):
            yield event
        if isinstance(event, RequestFinished):
            return


if __name__ == "__main__":
    sys.exit(main(None))

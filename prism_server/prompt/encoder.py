"""From a request's words and media facts to an `EncodedPrompt`. Pure, and safe from any thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from prism_server.errors import BadRequest
from prism_server.identity import Digest, cache_seed, media_chain_keys
from prism_server.media.item import ItemFacts, MediaItem
from prism_server.media.messages import MediaContent, Message, chain_parts
from prism_server.prompt.encoded import EncodedPrompt
from prism_server.prompt.keys import PageChain, boundaries
from prism_server.prompt.placeholders import Laid, Rows, Run, VideoPrompt, assign, expand, lay_out, num_rows
from prism_server.prompt.positions import mrope_positions
from prism_server.prompt.template import ChatTemplate, check_unicode
from prism_server.prompt.tokenizer import Tokenizer


class PromptEncoder:
    """Everything that is known about a prompt before the engine sees it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        page_tokens: int,
        namespace: Digest,
        max_context_tokens: int,
        video_prompt: VideoPrompt = "nested",
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.page_tokens = page_tokens
        self.namespace = namespace
        self.max_context_tokens = max_context_tokens
        self.video_prompt: VideoPrompt = video_prompt

    def encode_chat(
        self,
        messages: Sequence[Message],
        facts: Sequence[ItemFacts] = (),
        media: Sequence[MediaItem] = (),
        cache_salt: str | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_variables: Mapping[str, Any] | None = None,
    ) -> EncodedPrompt:
        """A conversation; `facts[i]` and `media[i]` belong to the parts with `media_index` i.

        BadRequest, with `param`: the template refuses or drops something, text that is not Unicode, too long.
        """
        pieces = self.template.render(messages, tools, add_generation_prompt, template_variables)
        contents = [part for message in messages for part in message.parts if isinstance(part, MediaContent)]
        _check_kinds(contents, facts, media)
        tokens = self.tokenizer.media_tokens
        order = assign(pieces, contents, tokens.kind_of_pad)
        runs = self._runs(lay_out(pieces, order, contents, facts, tokens, self.video_prompt), "messages")
        self._check_length(num_rows(runs), "messages")
        seed = cache_seed(self.namespace, cache_salt)
        content_ids, options = [item.key.content_id for item in facts], [item.options for item in media]
        keys = media_chain_keys(seed, chain_parts(messages, content_ids, options))
        return self._prompt(expand(runs, tokens), seed, keys)

    def encode_text(
        self, prompt: str | Sequence[int], cache_salt: str | None = None, *, param: str = "prompt"
    ) -> EncodedPrompt:
        """A bare prompt: text, in which nothing is a control token, or token ids.

        BadRequest: empty, too long, not Unicode, an id outside the vocabulary or one that stands for a medium.
        """
        runs: list[Run]
        if isinstance(prompt, str):
            check_unicode(prompt, param)
            runs = self._runs([prompt] if prompt else [], param)
        else:
            self._check_length(len(prompt), param)
            runs = [self._checked_ids(prompt, param)]
        self._check_length(num_rows(runs), param)
        rows = expand(runs, self.tokenizer.media_tokens)
        return self._prompt(rows, cache_seed(self.namespace, cache_salt), ())

    def _runs(self, pieces: Sequence[Laid], param: str) -> list[Run]:
        """Text pieces become ids. Text that cannot fit is refused unencoded: the ids of 100 MB take gigabytes."""
        texts = [piece for piece in pieces if isinstance(piece, str)]
        if sum(map(len, texts)) > self.max_context_tokens * self.tokenizer.longest_token_bytes // 4:
            self._check_could_fit(texts, param)
        encoded = iter(self.tokenizer.encode_runs(texts))
        return [next(encoded) if isinstance(piece, str) else piece for piece in pieces]

    def _check_could_fit(self, texts: Sequence[str], param: str) -> None:
        """Refuses texts of which no tokenisation fits, as far as they have to be read to know."""
        least = 0
        for text in texts:
            least += self.tokenizer.least_tokens(text, self.max_context_tokens - least)
            if least >= self.max_context_tokens:
                self._check_length(least, param, counted="at least ")

    def _check_length(self, num_tokens: int, param: str, counted: str = "") -> None:
        if num_tokens == 0:
            raise BadRequest("the prompt is empty", param=param)
        if num_tokens >= self.max_context_tokens:
            raise BadRequest(
                f"the prompt has {counted}{num_tokens} tokens, which leaves no room for an answer: prompt and answer "
                f"together may have {self.max_context_tokens} tokens",
                param=param,
                code="context_length_exceeded",
            )

    def _checked_ids(self, token_ids: Sequence[int], param: str) -> npt.NDArray[np.int32]:
        for i, token_id in enumerate(token_ids):
            if not 0 <= token_id < self.tokenizer.vocab_size:
                raise BadRequest(
                    f"token id {token_id} at {i} does not lie in [0, {self.tokenizer.vocab_size})", param=param
                )
            if token_id in self.tokenizer.media_tokens.kind_of_pad:
                raise BadRequest(
                    f"token id {token_id} at {i} stands for a medium; send media in chat messages", param=param
                )
        return np.asarray(token_ids, dtype=np.int32)

    def _prompt(self, rows: Rows, seed: Digest, media_keys: Sequence[Digest]) -> EncodedPrompt:
        positions, delta = mrope_positions(len(rows.token_ids), rows.spans)
        chain = PageChain(seed, rows.token_ids, rows.spans, self.page_tokens)
        return EncodedPrompt(
            token_ids=rows.token_ids,
            positions=positions,
            delta=delta,
            spans=rows.spans,
            seed=seed,
            page_keys=chain.page_keys,
            boundaries=boundaries(chain, rows.spans, [media_keys[part] for part in rows.parts]),
        )


def _check_kinds(contents: Sequence[MediaContent], facts: Sequence[ItemFacts], media: Sequence[MediaItem]) -> None:
    if len(facts) != len(media):
        raise ValueError(f"{len(facts)} facts for {len(media)} media")
    for content in contents:
        if facts[content.media_index].kind != content.kind:
            raise ValueError(f"item {content.media_index} is of kind {facts[content.media_index].kind}: {content}")

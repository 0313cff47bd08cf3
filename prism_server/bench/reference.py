"""Hugging Face's own answers to the same questions: the model as its authors run it, one question at a time."""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Sequence
from typing import Any

from PIL import Image

from prism_server.bench.questions import Question
from prism_server.bench.reference_clips import ClipReference
from prism_server.demo_model import checkpoint_dir
from prism_server.errors import StartupError

IMAGE_PAD = "<|image_pad|>"
VIDEO_PAD = "<|video_pad|>"


class Reference:
    """`generate()` in float32 on CPU, greedy, with the PIL image processor: no batch, no cache between questions."""

    def __init__(self, threads: int) -> None:
        try:
            transformers: Any = importlib.import_module("transformers")
        except ImportError:
            raise StartupError("--reference needs transformers: pip install 'prism-server[dev]'") from None
        transformers.utils.logging.disable_progress_bar()
        self._torch: Any = importlib.import_module("torch")
        self._torch.set_num_threads(threads)
        directory = checkpoint_dir()
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        self._processor = transformers.Qwen2VLImageProcessorPil.from_pretrained(directory)
        self._clips = ClipReference(directory, self._processor, self._tokenizer)
        model = transformers.Qwen3VLForConditionalGeneration.from_pretrained(directory, dtype=self._torch.float32)
        self._model = model.eval()

    def answer_all(
        self, questions: Sequence[Question], max_tokens: int, on_answer: Callable[[int], None]
    ) -> tuple[str, ...]:
        """Texts in order; `on_answer` is told how many there are so far."""
        answers: list[str] = []
        for question in questions:
            answers.append(self._answer(question, max_tokens))
            on_answer(len(answers))
        return tuple(answers)

    def _answer(self, question: Question, max_tokens: int) -> str:
        ids, pixels = self._inputs(question)
        config = self._model.config
        with self._torch.inference_mode():
            output = self._model.generate(
                input_ids=ids,
                attention_mask=self._torch.ones_like(ids),
                mm_token_type_ids=(ids == config.image_token_id).int() + 2 * (ids == config.video_token_id).int(),
                max_new_tokens=max_tokens,
                do_sample=False,
                **pixels,
            )
        return str(self._tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))

    def _inputs(self, question: Question) -> tuple[Any, dict[str, Any]]:
        """Token ids int64 [1, n], each picture's placeholder repeated once a token, and its pixels."""
        pictures = [Image.open(io.BytesIO(picture)).convert("RGB") for picture in question.pictures]
        if question.fps is not None:
            return self._clip_inputs(pictures, question.fps, question.text)
        content = [{"type": "image"} for _ in pictures] + [{"type": "text", "text": question.text}]
        text = self._rendered(content)
        pixels: dict[str, Any] = {}
        if pictures:
            pixels = dict(self._processor(pictures, return_tensors="pt"))
            merged = self._processor.merge_size**2
            lengths = [int(grid.prod()) // merged for grid in pixels["image_grid_thw"]]
            before, *after = text.split(IMAGE_PAD)
            text = before + "".join(IMAGE_PAD * n + part for n, part in zip(lengths, after, strict=True))
        return self._ids(text), pixels

    def _clip_inputs(self, frames: list[Image.Image], fps: float, question: str) -> tuple[Any, dict[str, Any]]:
        clip, pixels = self._clips.inputs(frames, fps)
        text = self._rendered([{"type": "video"}, {"type": "text", "text": question}])
        return self._ids(text.replace(VIDEO_PAD, clip)), pixels

    def _rendered(self, content: list[dict[str, str]]) -> str:
        chat = [{"role": "user", "content": content}]
        return str(self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))

    def _ids(self, text: str) -> Any:
        return self._tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]

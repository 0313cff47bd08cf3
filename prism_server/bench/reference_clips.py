"""What Hugging Face's own processor makes of a clip: the frames it samples, its patches, its text of times and rows."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image


class ClipReference:
    """`Qwen3VLVideoProcessor` and `Qwen3VLProcessor` of a checkpoint, step by step.

    The processors as a whole need torchvision, and only to resize: here frames must have the size they are shown at.
    """

    def __init__(self, directory: Path, image_processor: Any, tokenizer: Any) -> None:
        family = "transformers.models.qwen3_vl"
        self._torch: Any = importlib.import_module("torch")
        self._clips: Any = importlib.import_module(f"{family}.video_processing_qwen3_vl")
        self._metadata: Any = importlib.import_module("transformers.video_utils").VideoMetadata
        processing: Any = importlib.import_module(f"{family}.processing_qwen3_vl")

        class Processor(processing.Qwen3VLProcessor):  # type: ignore[misc]
            """Without the check of its parts' classes, which needs torchvision."""

            def check_argument_for_proper_class(self, name: str, part: Any) -> type:
                return type(part)

        self._videos = self._clips.Qwen3VLVideoProcessor.from_pretrained(directory)
        self._processor = Processor(image_processor, tokenizer, self._videos)

    def inputs(self, frames: Sequence[Image.Image], fps: float) -> tuple[str, dict[str, Any]]:
        """What takes the place of the template's video placeholder, and the model's `pixel_values_videos` and grid."""
        videos = self._videos
        metadata = self._metadata(total_num_frames=len(frames), fps=fps)
        metadata.frames_indices = videos.sample_frames(metadata)
        shown = [frames[number] for number in metadata.frames_indices.tolist()]
        width, height = shown[0].size
        patch, merge, depth = videos.patch_size, videos.merge_size, videos.temporal_patch_size
        areas = videos.size["shortest_edge"], videos.size["longest_edge"]
        size = self._clips.smart_resize(len(shown), height, width, depth, patch * merge, *areas)
        if size != (height, width):
            raise ValueError(f"frames of {width} x {height} would be resized to {size[1]} x {size[0]}")
        pixels = self._torch.stack(
            [self._torch.frombuffer(bytearray(f.tobytes()), dtype=self._torch.uint8) for f in shown]
        )
        pixels = pixels.view(1, len(shown), height, width, 3).permute(0, 1, 4, 2, 3).float() / 255
        mean, std = (self._torch.tensor(values).view(3, 1, 1) for values in (videos.image_mean, videos.image_std))
        patches, *grid = videos.patchify((pixels - mean) / std, patch, merge, depth)
        inputs = {"pixel_values_videos": patches[0], "video_grid_thw": self._torch.tensor([grid])}
        return self._processor.replace_video_token(inputs | {"video_metadata": [metadata]}, 0), inputs

"""Records what Hugging Face's video processor makes of clips drawn here: `python tests/media/record_clip_pixels.py`.

It needs torchvision, for resizing only, which the tests do without. The cases are read from `test_clip_pixels.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from clip_making import speckled
from test_clip_pixels import CASES, FIXTURE, SHARE
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata

DEMO = Path(__file__).parents[2] / "prism_server" / "demo_model" / "checkpoint"


def main() -> int:
    processor = Qwen3VLVideoProcessor.from_pretrained(DEMO)
    recorded: dict[str, np.ndarray] = {}
    for case in CASES:
        frames = torch.from_numpy(np.stack(speckled(case.count, case.width, case.height))).permute(0, 3, 1, 2)
        metadata = VideoMetadata(total_num_frames=case.count, fps=case.fps)
        made = processor([frames], video_metadata=[metadata], return_metadata=True, return_tensors="pt")
        patches = made["pixel_values_videos"].reshape(-1, 3, 2, 16, 16)[::SHARE]
        recorded[f"{case.name}.pixels"] = ((patches * 0.5 + 0.5) * 255).round().to(torch.uint8).numpy()
        recorded[f"{case.name}.grid"] = made["video_grid_thw"][0].numpy()
        recorded[f"{case.name}.frames"] = np.asarray(made["video_metadata"][0].frames_indices)
    np.savez_compressed(FIXTURE, **recorded)
    return 0


if __name__ == "__main__":
    sys.exit(main())

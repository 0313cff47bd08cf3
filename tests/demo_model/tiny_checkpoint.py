"""A checkpoint directory without weights, of a model so small that it trains on a CPU; the bundled tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from prism_server.demo_model import checkpoint_dir
from prism_server.demo_model.training.state import copy_template


def write_tiny_template(directory: Path) -> Path:
    copy_template(checkpoint_dir(), directory)
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["text_config"] |= {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    config["text_config"]["rope_parameters"]["mrope_section"] = [6, 5, 5]
    config["vision_config"] |= {
        "depth": 3,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_heads": 2,
        "num_position_embeddings": 81,
        "out_hidden_size": 64,
        "deepstack_visual_indexes": [0, 2],
    }
    path.write_text(json.dumps(config), encoding="utf-8")
    return directory

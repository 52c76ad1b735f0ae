"""The shapes that are measured on a GPU, with random weights: folders of a ``config.json`` alone.

``tiny`` is there to try every command out, on a CPU too (``--device cpu``); nobody has targets for it.
"""

import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_QWEN: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "max_position_embeddings": 32_768,
    "num_hidden_layers": 28,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "bos_token_id": 151_643,
    "eos_token_id": 151_643,
}

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-7b": {
        **_QWEN,
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "vocab_size": 152_064,
    },
    "qwen2.5-1.5b": {
        **_QWEN,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "vocab_size": 151_936,
    },
    "tiny": {
        **_QWEN,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "vocab_size": 2048,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
}


def model_folder(name: str) -> str:
    """A new folder with the shape's ``config.json``."""
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-"))
    (folder / "config.json").write_text(json.dumps(SHAPES[name]))
    return str(folder)


def random_prompts(name: str, lens: Sequence[int], rng: random.Random) -> list[list[int]]:
    """Token ids of prompts of these lengths, never 0."""
    return [[rng.randrange(1, SHAPES[name]["vocab_size"] - 1000) for _ in range(n)] for n in lens]

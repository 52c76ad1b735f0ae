"""The model "script": it says what each request tells it to, so that tests of text are exact.

Contract: ``params.extensions["script"]``, a list of token ids, is played as one-hot logits, token by token, then EOS
for ever; without a script there is only EOS. Everything else is the ordinary engine: the model costs next to nothing,
but has a KV cache to be accounted for, and sampling parameters do what they do to any logits. Log-probabilities, which
are those of the raw logits, say EOS everywhere. The tokenizer is "T1" (320 tokens, ``testing.tokenizers``), the logits
are 384 wide.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from mini_infer.errors import ConfigError, RequestError
from mini_infer.interfaces import CausalLM, KVCacheSpec, LogitsProcessor, ModelAdapter, ModelConfig, WeightLoader
from mini_infer.layers import Attention
from mini_infer.testing.engines import SCRIPT, VOCAB_SIZE, scratch_folder
from mini_infer.testing.tokenizers import byte_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from mini_infer.forward_batch import ForwardBatch
    from mini_infer.interfaces import NewRow, SamplingRows
    from mini_infer.sampling_params import SamplingParams

EOS = 319
HOT = 100.0
"""The scripted token's logit; the others' are 0. No noise overcomes it at a temperature below 3."""

_ARCHITECTURE = "ScriptForCausalLM"
_CONFIG: dict[str, Any] = {
    "architectures": [_ARCHITECTURE],
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 1024,
    "eos_token_id": EOS,
}


class ScriptForCausalLM(nn.Module, CausalLM):
    """Always EOS; ``ScriptProcessor`` plays the scripts. Its one attention layer is never run."""

    def __init__(self, config: ModelConfig, step_seconds: float) -> None:
        super().__init__()
        dtype = str(config.dtype).removeprefix("torch.")
        self.attn = Attention(1, KVCacheSpec("full", 1, 16, 16, dtype), 1.0)
        self._dtype = config.dtype
        self._step_seconds = step_seconds

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        if self._step_seconds:
            time.sleep(self._step_seconds)
        return torch.zeros(input_ids.shape[0], 1, dtype=self._dtype, device=input_ids.device)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = hidden.new_zeros(hidden.shape[0], VOCAB_SIZE)
        logits[:, EOS] = HOT
        return logits


class ScriptAdapter(ModelAdapter):
    """Builds the model.

    Args:
        step_seconds: how long a step takes at least.
    """

    name: ClassVar[str] = SCRIPT
    architectures: ClassVar[tuple[str, ...]] = (_ARCHITECTURE,)

    def __init__(self, step_seconds: float) -> None:
        self._step_seconds = step_seconds

    def check(self, config: ModelConfig) -> None:
        return

    def build(self, config: ModelConfig) -> nn.Module:
        return ScriptForCausalLM(config, self._step_seconds)

    def load(self, module: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        return


class ScriptLoader(WeightLoader):
    """Finds the model by its name, and has no weights."""

    name: ClassVar[str] = SCRIPT

    def locate(self, model: str) -> Path | None:
        if model != SCRIPT:
            return None
        folder = scratch_folder() / SCRIPT
        if not folder.is_dir():
            byte_tokenizer().save(folder)
            (folder / "config.json").write_text(json.dumps(_CONFIG))
        return folder

    def accepts(self, path: Path) -> bool:
        return path == scratch_folder() / SCRIPT

    def weights(self, path: Path, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
        raise ConfigError(f"the model '{SCRIPT}' has no weights")

    def fill(self, module: nn.Module, config: ModelConfig) -> bool:
        return True


class ScriptProcessor(LogitsProcessor):
    """Plays the scripts: a token's place in its script follows from its position alone."""

    name: ClassVar[str] = SCRIPT

    def __init__(self) -> None:
        self._scripts: dict[int, tuple[int, list[int]]] = {}  # slot -> (tokens of the prompt, script)

    def wants(self, params: SamplingParams) -> bool:
        script = params.extensions.get(SCRIPT)
        if script is None:
            return False
        if not isinstance(script, list) or not all(type(i) is int and 0 <= i < VOCAB_SIZE for i in script):
            raise RequestError(f"{SCRIPT} must be a list of token ids from 0 to {VOCAB_SIZE - 1}", param=SCRIPT)
        return True

    def add(self, row: NewRow) -> None:
        self._scripts[row.slot] = row.num_prompt_tokens, row.params.extensions[SCRIPT]

    def remove(self, slot: int) -> None:
        del self._scripts[slot]

    def apply(self, logits: torch.Tensor, rows: SamplingRows, mine: list[int]) -> torch.Tensor:
        positions = rows.positions.tolist()
        for row in mine:
            num_prompt, script = self._scripts[rows.slots_host[row]]
            index = positions[row] - num_prompt
            logits[row] = 0.0
            logits[row, script[index] if index < len(script) else EOS] = HOT
        return logits

"""What a model folder says about how to generate: all ids that end a text, and default sampling values.

Contract: ``load_generation_config`` reads ``generation_config.json`` and ``config.json`` of a local folder, either of
which may be missing. A value is taken or refused, never changed; for each the result names the file it came from, so
that ``config explain`` can show it. Values that the files leave open stay None: the engine's defaults apply, not those
of transformers (whose ``top_k`` is 50).

Source: https://huggingface.co/docs/transformers/main_classes/text_generation#transformers.GenerationConfig
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mini_infer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

GENERATION_FILE = "generation_config.json"
MODEL_FILE = "config.json"
SAMPLING_VALUES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """What the folder says; None where it says nothing.

    Attributes:
        eos_token_ids: every id that ends a text, those of generation_config.json first.
        bos_token_id: the id that starts a text.
        pad_token_id: the id of padding.
        temperature: 0 for greedy, as ``"do_sample": false`` asks for.
        top_p: 0 to 1.
        top_k: number of tokens; 0 or -1 for all.
        min_p: 0 to 1.
        repetition_penalty: more than 0; 1 is none.
        max_new_tokens: how many tokens at most.
        sources: for each value that is there, the name of the file it came from.
    """

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def sampling(self) -> dict[str, float]:
        """The sampling values that are there, by the names of ``SamplingParams``; no limit of length."""
        values = {name: getattr(self, name) for name in SAMPLING_VALUES}
        return {name: value for name, value in values.items() if value is not None}


def load_generation_config(folder: Path) -> GenerationConfig:
    """Read a model folder's files.

    Raises:
        ConfigError: a file is not JSON, or a value is of the wrong kind or out of range; file and key are named.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name in (GENERATION_FILE, MODEL_FILE):
        read = _Reader(name, _read_object(folder / name))
        found = read.ids() | (read.sampling() if name == GENERATION_FILE else {})
        for key, value in found.items():
            if key == "eos_token_ids":  # the files add up: a model may end a text by the ids of either
                earlier = values.get(key, ())
                values[key] = earlier + tuple(token_id for token_id in value if token_id not in earlier)
                sources[key] = (
                    f"{sources[key]}, {name}" if earlier and values[key] != earlier else sources.get(key, name)
                )
            elif key not in values:
                values[key], sources[key] = value, name
    return GenerationConfig(**values, sources=sources)


class _Reader:
    """Typed access to one file's values."""

    def __init__(self, name: str, content: Mapping[str, Any]) -> None:
        self._name = name
        self._content = content

    def ids(self) -> dict[str, Any]:
        """The ids, which models of several parts keep under ``text_config``."""
        text = self._content.get("text_config")
        inner = _Reader(self._name, text).ids() if isinstance(text, dict) else {}
        found: dict[str, Any] = {key: self._id(key) for key in ("bos_token_id", "pad_token_id")}
        found["eos_token_ids"] = self._ids("eos_token_id")
        return inner | {key: value for key, value in found.items() if value not in (None, ())}

    def sampling(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "temperature": self._number("temperature", 0, math.inf),
            "top_p": self._number("top_p", 0, 1),
            "min_p": self._number("min_p", 0, 1),
            "top_k": self._integer("top_k", -1),
            "repetition_penalty": self._number("repetition_penalty", 0, math.inf),
            "max_new_tokens": self._integer("max_new_tokens", 1),
        }
        if found["repetition_penalty"] == 0:
            raise self._wrong("repetition_penalty", "a number above 0")
        if self._content.get("do_sample") is False:
            found["temperature"] = 0.0
        return {key: value for key, value in found.items() if value is not None}

    def _ids(self, key: str) -> tuple[int, ...]:
        value = self._content.get(key)
        if value is None:
            return ()
        ids = tuple(value) if isinstance(value, list) else (value,)
        if not all(_is_integer(token_id) and token_id >= 0 for token_id in ids):
            raise self._wrong(key, "a token id or a list of them")
        return ids

    def _id(self, key: str) -> int | None:
        """One id; some files write -1, or a list of one, for none or for one."""
        value = self._content.get(key)
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if value is None or (_is_integer(value) and value < 0):
            return None
        if not _is_integer(value):
            raise self._wrong(key, "a token id")
        return int(value)

    def _integer(self, key: str, least: int) -> int | None:
        value = self._content.get(key)
        if value is None:
            return None
        if not _is_integer(value) or value < least:
            raise self._wrong(key, f"an integer of at least {least}")
        return int(value)

    def _number(self, key: str, least: float, most: float) -> float | None:
        value = self._content.get(key)
        if value is None:
            return None
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not least <= value <= most or value == math.inf:
            raise self._wrong(
                key, f"a number of at least {least}" + (f" and at most {most}" if most < math.inf else "")
            )
        return float(value)

    def _wrong(self, key: str, right: str) -> ConfigError:
        return ConfigError(f"{self._name}: '{key}' is {self._content[key]!r}, but must be {right}")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _read_object(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"cannot read {path}: it holds no JSON object")
    return content

"""generation_config.json and config.json: values, sources, and files that are wrong."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError
from typing import TYPE_CHECKING, Any

import pytest

from mini_infer.errors import ConfigError
from mini_infer.model.generation_config import SAMPLING_VALUES, GenerationConfig, load_generation_config
from mini_infer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pathlib import Path


def load(folder: Path, generation: Any = None, model: Any = None) -> GenerationConfig:
    for name, content in (("generation_config.json", generation), ("config.json", model)):
        if content is not None:
            (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return load_generation_config(folder)


def test_missing_files_say_nothing(tmp_path: Path) -> None:
    assert load(tmp_path) == GenerationConfig()


def test_all_values_and_where_they_came_from(tmp_path: Path) -> None:
    generation = {
        "bos_token_id": 7,
        "do_sample": True,
        "eos_token_id": [151645, 151643],
        "max_new_tokens": 2048,
        "min_p": 0.05,
        "pad_token_id": 151643,
        "repetition_penalty": 1.05,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
        "transformers_version": "4.37.0",
    }
    assert load(tmp_path, generation, {"eos_token_id": 151645, "bos_token_id": 8}) == GenerationConfig(
        eos_token_ids=(151645, 151643),
        bos_token_id=7,
        pad_token_id=151643,
        temperature=0.7,
        top_p=0.8,
        top_k=20,
        min_p=0.05,
        repetition_penalty=1.05,
        max_new_tokens=2048,
        sources={
            key: "generation_config.json"
            for key in ("eos_token_ids", "bos_token_id", "pad_token_id", "max_new_tokens", *SAMPLING_VALUES)
        },
    )


def test_sampling_is_what_sampling_params_take(tmp_path: Path) -> None:
    given = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1}
    config = load(tmp_path, {**given, "eos_token_id": 1, "max_new_tokens": 3})
    assert config.sampling == given
    assert SamplingParams(**config.sampling).top_k == 5
    assert GenerationConfig().sampling == {}


def test_eos_ids_of_both_files_add_up(tmp_path: Path) -> None:
    defaults = load(tmp_path, {"eos_token_id": [9, 4]}, {"eos_token_id": [2, 9]})
    assert defaults.eos_token_ids == (9, 4, 2)
    assert defaults.sources["eos_token_ids"] == "generation_config.json, config.json"


def test_config_json_alone(tmp_path: Path) -> None:
    defaults = load(tmp_path, model={"eos_token_id": 2, "temperature": 0.1, "pad_token_id": -1})
    assert defaults == GenerationConfig(eos_token_ids=(2,), sources={"eos_token_ids": "config.json"})


def test_ids_inside_text_config(tmp_path: Path) -> None:
    assert load(tmp_path, model={"text_config": {"eos_token_id": 3, "bos_token_id": [1]}}).eos_token_ids == (3,)
    assert load(tmp_path, model={"text_config": {"eos_token_id": 3}, "eos_token_id": 4}).eos_token_ids == (4,)


def test_do_sample_false_is_greedy(tmp_path: Path) -> None:
    assert load(tmp_path, {"do_sample": False, "temperature": 0.6}).temperature == 0
    assert load(tmp_path, {"temperature": 0.6}).temperature == 0.6


def test_zero_is_a_value(tmp_path: Path) -> None:
    defaults = load(tmp_path, {"temperature": 0, "top_k": -1, "top_p": 0, "eos_token_id": 0, "bos_token_id": 0})
    assert (defaults.temperature, defaults.top_k, defaults.top_p) == (0, -1, 0)
    assert (defaults.eos_token_ids, defaults.bos_token_id) == ((0,), 0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", "0.7"),
        ("temperature", -1),
        ("temperature", True),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("top_k", 1.5),
        ("top_k", -2),
        ("repetition_penalty", 0),
        ("max_new_tokens", 0),
        ("eos_token_id", "</s>"),
        ("eos_token_id", [1, None]),
        ("bos_token_id", 1.0),
    ],
)
def test_wrong_values_are_named(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"generation_config.json: '{key}' is "):
        load(tmp_path, {key: value})


@pytest.mark.parametrize("content", ["{", "[]", "\udcff", "[" * 100_000], ids=["cut", "list", "bytes", "deep"])
def test_broken_files_are_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_generation_config(tmp_path)


def test_it_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        GenerationConfig().top_k = 3  # type: ignore[misc]

"""The settings of one engine and its server: what can be set, the defaults, and where each value came from.

Contract: settings are frozen; "auto" stays "auto" here and is resolved when the engine is built. Precedence, highest
first: command line (``--set`` before options; ``LLM(...)`` arguments stand in its place), environment
``MINI_INFER_…__…``, the file ``mini-infer.toml``, defaults. ``Settings(...)`` itself reads no file and no environment.
Importing this module imports neither torch nor transformers.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    WithJsonSchema,
)
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from mini_infer.errors import ConfigError
from mini_infer.settings.errors import error_lines
from mini_infer.settings.sources import TABLES, environment_layer, file_layer, mapping_layer

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_CONFIG = Path("mini-infer.toml")

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_size(text: str) -> int:
    """Returns the bytes in a size such as ``"12GiB"``, ``"500 MB"`` or ``"1073741824"``.

    Raises:
        ValueError: not a size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([a-zA-Z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError("should be 'auto', a size such as '12GiB' or a share such as 0.5")
    size = float(match[1]) * _UNITS[match[2].upper()]
    if size >= 2**63:
        raise ValueError("should be 'auto' or a size below 8 million TiB")
    return int(size)


def parse_share(text: str) -> float | None:
    """Returns the share in a number with a point and no unit, such as ``"0.5"``; None for a size.

    Raises:
        ValueError: it is not above 0 and at most 1.
    """
    if re.fullmatch(r"\d*\.\d+", text.strip()) is None:
        return None
    if not 0 < float(text) <= 1:
        raise ValueError("should be a share above 0 and at most 1, or a size with its unit such as '1.5GiB'")
    return float(text)


def _number_as_text(value: object) -> object:
    return str(value) if isinstance(value, float) else value


def _memory(text: str) -> str:
    if text != "auto" and parse_share(text) is None:
        parse_size(text)
    return text


_FROZEN = ConfigDict(frozen=True, extra="forbid", strict=True)
# TOML and JSON bring lists; frozen settings keep tuples.
Names = Annotated[tuple[str, ...], Field(strict=False)]
Count = Annotated[int, Field(ge=1)]


class EngineSettings(BaseModel):
    """The table ``[engine]``."""

    model_config = _FROZEN

    device: str = Field(
        default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto: a GPU if there is one, else cpu"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="auto: the checkpoint's; float32 on a CPU"
    )
    load_format: str = Field(default="auto", description="a weight loader's name, such as safetensors, gguf or random")
    attention: str = Field(
        default="auto", description="an attention backend's name; auto: the best that fits each KV group"
    )
    order: str = Field(default="auto", description="an order policy's name; auto: the first that a plugin offers")
    victim: str = Field(
        default="auto", description="a victim policy's name, such as last-arrived; auto: the first that a plugin offers"
    )
    chunks: str = Field(default="auto", description="a chunk policy's name; auto: the first that a plugin offers")
    block_size: Count | None = Field(
        default=None, description="tokens a KV block; 16 unless a backend in use says otherwise"
    )
    num_kv_blocks: Count | None = Field(
        default=None, description="KV blocks, null block not counted; overrides kv_cache_memory"
    )
    kv_cache_memory: Annotated[
        str,
        BeforeValidator(_number_as_text),
        AfterValidator(_memory),
        WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "number", "exclusiveMinimum": 0, "maximum": 1}]}),
    ] = Field(
        default="auto",
        description="'12GiB' or 0.5 of what is free; auto: 0.9 of that on a GPU, at most 2 GiB on a CPU",
    )
    max_model_len: Count | Literal["auto"] = Field(
        default="auto", description="longest prompt + output in tokens; auto: the checkpoint's, shrunk to what fits"
    )
    max_num_seqs: Count = Field(default=256, le=2**16, description="requests in one step")
    max_num_batched_tokens: Count = Field(default=8192, le=2**22, description="tokens in one step")
    num_threads: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        default=None, description="torch's threads; unset: left alone"
    )
    skip_tokenizer: bool = Field(default=False, description="prompts and outputs are token ids only")
    overlap: bool | Literal["auto"] = Field(
        default="auto", description="prepare the next step while the device runs this one; auto: on a GPU"
    )
    seed: int | None = Field(
        default=None, description="where the seeds of unseeded requests are drawn from; unset: random"
    )
    revision: str | None = Field(default=None, description="branch, tag or commit of a model on the hub")
    offline: bool = Field(default=False, description="never ask the hub; the model must be on this machine")
    generation_config: Literal["auto", "ignore"] = Field(
        default="auto", description="auto: the model's generation_config.json gives stop ids and default sampling"
    )


class ServerSettings(BaseModel):
    """The table ``[server]``."""

    model_config = _FROZEN

    host: str = Field(default="127.0.0.1", description="address to listen on; 0.0.0.0 for every network")
    port: int = Field(default=8000, ge=0, le=65535, description="0: any free port")
    served_model_name: str | None = Field(default=None, description="the name clients use; unset: the setting model")
    api_keys: Names = Field(default=(), repr=False, description="accepted bearer tokens; none: no key is asked for")
    max_body_bytes: Count = Field(default=10_000_000, description="a longer request body is refused with 413")


class Settings(BaseSettings):
    """All settings, resolved from their sources; made by ``load_settings``."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())

    model: str = Field(default="demo", description="a Hugging Face id, a local folder, a .gguf file, or demo")
    plugins: Names = Field(
        default=("default",), description="plugins and sets in order; without 'default' it is the whole list"
    )
    without: Names = Field(default=(), description="plugins and sets to leave out")
    plugin_dirs: Names = Field(default=(), description="folders whose .py files are plugins")
    engine: EngineSettings = EngineSettings()
    server: ServerSettings = ServerSettings()
    plugin: dict[str, dict[str, Any]] = Field(
        default={}, description="one table a plugin, checked by the plugin's own Settings"
    )

    _sources: dict[str, str] = PrivateAttr(default_factory=dict)

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Keeps ``Settings(...)`` pure: what it is given, and nothing else. ``load_settings`` brings the layers."""
        return (init_settings,)

    @property
    def sources(self) -> Mapping[str, str]:
        """Where the value of each dotted key came from: ``mini-infer.toml:8``, ``env MINI_INFER_…``, ``default``, …"""
        tables = {key.rpartition(".")[0] for key in self._sources}
        set_keys = [key for key in self._sources if key not in tables and key not in TABLES]
        return {key: self.source_of(key) for key in [*leaf_keys(self), *set_keys]}

    def source_of(self, key: str) -> str:
        """Returns the source of the value at a dotted key, or of a table's first value; ``default`` where unset."""
        inside = (source for other, source in self._sources.items() if other.startswith(f"{key}."))
        return self._sources.get(key) or next(inside, "default")

    def to_json(self) -> str:
        """Writes values and sources, for another process; ``from_json`` is the inverse."""
        return json.dumps({"values": self.model_dump(mode="json"), "sources": self._sources})

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Reads what ``to_json`` wrote."""
        stored = json.loads(text)
        settings = cls(**stored["values"])
        settings._sources.update(stored["sources"])
        return settings


def leaf_keys(model: BaseModel, prefix: str = "") -> list[str]:
    """Returns the dotted keys of all values of a settings model, tables of plugins left out."""
    keys: list[str] = []
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            keys += leaf_keys(value, f"{prefix}{name}.")
        elif not isinstance(value, dict):
            keys.append(prefix + name)
    return keys


def load_settings(
    *,
    config: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    arguments: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    argument_source: str = "argument",
) -> Settings:
    """Resolves the settings from all sources.

    Args:
        config: the file; ``None`` reads ``mini-infer.toml`` in the working directory if there is one.
        overrides: dotted keys, such as ``{"plugin.prefix-cache.eviction": "lfu"}``; text is read as its field wants.
        arguments: nested values, such as ``{"model": "demo", "engine": {"dtype": "float32"}}``.
        environ: the environment; ``None`` is this process's.
        argument_source: what the source of ``arguments`` is called.

    Raises:
        ConfigError: all that is wrong, one line an error.
    """
    if config is None and DEFAULT_CONFIG.is_file():
        config = DEFAULT_CONFIG
    layers = [
        mapping_layer(overrides or {}, "--set", Settings, dotted=True),
        mapping_layer(arguments or {}, argument_source, Settings),
        environment_layer(os.environ if environ is None else environ, Settings),
    ]
    if config is not None:
        layers.append(file_layer(config, Settings))

    sources: dict[str, str] = {}
    for layer in reversed(layers):
        sources.update(layer.origins)
    problems = [line for layer in layers for line in layer.problems]
    try:
        # The merge is pydantic-settings': earlier layers win, tables are joined.
        merged: dict[str, Any] = {"_build_sources": (tuple(layers), {})}
        settings = Settings(**merged)
    except ValidationError as e:
        problems += error_lines(e, Settings, sources)
        raise ConfigError("\n".join(problems)) from e
    if problems:
        raise ConfigError("\n".join(problems))
    settings._sources.update(sources)
    return settings

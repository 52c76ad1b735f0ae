"""The sources that settings come from, each read into a layer that remembers the origin of every value.

Contract: a layer holds values as the fields want them (text from the environment and ``--set`` is read by the field's
type) and never raises for what a user wrote; what is wrong is kept in ``problems`` so that all of it is told at once.
The exception is a file that cannot be read.
"""

from __future__ import annotations

import contextlib
import json
import re
import tomllib
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from mini_infer.errors import ConfigError
from mini_infer.settings.toml_lines import key_lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from pydantic.fields import FieldInfo

ENV_PREFIX = "MINI_INFER_"
# Names with the prefix that are no settings.
NOT_SETTINGS = frozenset({"MINI_INFER_TEST_FULL"})
TABLES = ("engine", "server", "plugin")


class Layer(PydanticBaseSettingsSource):
    """One source of settings, in the shape that pydantic-settings merges.

    Attributes:
        values: nested as in the file.
        origins: where each leaf was set, by dotted key.
        problems: what could not be taken in, one line each.
    """

    def __init__(self, settings_cls: type[BaseSettings], values: dict[str, Any], origins: dict[str, str]) -> None:
        super().__init__(settings_cls)
        self.values = values
        self.origins = origins
        self.problems: list[str] = []
        for key in TABLES:
            if key in values and not isinstance(values[key], dict):
                self.problems.append(f"{origins[key]}: '{key}' should be a table, not {values.pop(key)!r}")
        for name, table in list(values.get("plugin", {}).items()):
            if not isinstance(table, dict):
                key = f"plugin.{name}"
                self.problems.append(f"{origins[key]}: '{key}' should be a table, not {values['plugin'].pop(name)!r}")

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return self.values.get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        return self.values


def file_layer(path: Path, settings_cls: type[BaseSettings]) -> Layer:
    """Reads a TOML file; origins are ``file:line``.

    Raises:
        ConfigError: the file is missing or is not TOML.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        place = re.search(r" \(at line (\d+), column \d+\)", str(e))
        line = f":{place[1]}" if place else ""
        raise ConfigError(f"{path}{line}: not valid TOML: {str(e).split(' (at ')[0]}") from e
    except RecursionError as e:
        raise ConfigError(f"{path}: nested too deeply") from e
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path}: not UTF-8 text") from e
    except OSError as e:
        raise ConfigError(f"{path}: cannot read the settings file: {e.strerror}") from e
    if isinstance(values.get("plugin_dirs"), list):  # relative to the file that names them
        values["plugin_dirs"] = [str(path.parent / str(folder)) for folder in values["plugin_dirs"]]
    lines = key_lines(text)
    return Layer(settings_cls, values, {".".join(key): f"{path}:{line}" for key, line in lines.items()})


def mapping_layer(
    given: Mapping[str, Any], source: str, settings_cls: type[BaseSettings], *, dotted: bool = False
) -> Layer:
    """Takes nested values, or dotted keys whose text is read by the field's type. A value of ``None`` is not given."""
    items = [(tuple(key.split(".")), value) for key, value in given.items()] if dotted else list(_leaves(given))
    return _layer([(key, value, source) for key, value in items], settings_cls, texts=dotted)


def environment_layer(environ: Mapping[str, str], settings_cls: type[BaseSettings]) -> Layer:
    """Takes each ``MINI_INFER_…`` name; ``__`` nests, and in plugins' names ``_`` stands for ``-``."""
    items = []
    for name, text in sorted(environ.items()):
        if not name.startswith(ENV_PREFIX) or name in NOT_SETTINGS:
            continue
        key = name.removeprefix(ENV_PREFIX).lower().split("__")
        if key[0] == "plugin" and len(key) > 1:
            key[1] = key[1].replace("_", "-")
        items.append((tuple(key), text, f"env {name}"))
    return _layer(items, settings_cls, texts=True)


def is_text(source: str) -> bool:
    """Says whether values of this source arrive as text, whatever their field's type."""
    return source == "--set" or source.startswith("env ")


def read_text(text: str, annotation: Any) -> Any:
    """Reads text as a value of the annotated type: as it stands, as TOML, as JSON, as a list with commas.

    Where none fits, returns one of the right type but out of range, else the text, for validation to complain about.
    """
    adapter = TypeAdapter[Any](annotation)
    nearest: Any = text
    for strict in (True, False):
        for value in _readings(text):
            if isinstance(value, bool) and not strict:  # true is no 1
                continue
            try:
                return adapter.validate_python(value, strict=strict)
            except ValidationError as e:
                if not all(detail["type"].endswith(("_type", "_parsing", "literal_error")) for detail in e.errors()):
                    nearest = value
    return nearest


def read_texts(
    values: Mapping[str, Any], model: type[BaseModel], key: str, sources: Mapping[str, str]
) -> dict[str, Any]:
    """Returns the values of the table at dotted ``key``, those from text sources read as the model's fields want."""
    read: dict[str, Any] = {}
    for name, value in values.items():
        field = model.model_fields.get(name)
        dotted = f"{key}.{name}" if key else name
        if field is None:
            read[name] = value
        elif isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            read[name] = read_texts(value, field.annotation, dotted, sources) if isinstance(value, dict) else value
        elif isinstance(value, str) and is_text(sources.get(dotted, "")):
            read[name] = read_text(value, Annotated[field.annotation, *field.metadata, None])
        else:
            read[name] = value
    return read


def _layer(items: list[tuple[tuple[str, ...], Any, str]], settings_cls: type[BaseSettings], *, texts: bool) -> Layer:
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    problems = []
    for key, value, source in items:
        if not all(key):
            problems.append(f"{source}: '{'.'.join(key)}' is no key: write it as engine.dtype is")
            continue
        table = values
        for part in key[:-1]:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                break
        if not isinstance(table, dict) or isinstance(table.get(key[-1]), dict):
            problems.append(f"{source}: '{'.'.join(key)}' is set both as a value and as a table")
            continue
        table[key[-1]] = value
        origins[".".join(key)] = source
    layer = Layer(settings_cls, read_texts(values, settings_cls, "", origins) if texts else values, origins)
    layer.problems += problems
    return layer


def _leaves(table: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*prefix, name))
        elif value is not None:
            yield (*prefix, name), value


def _readings(text: str) -> Iterator[Any]:
    yield text
    with contextlib.suppress(tomllib.TOMLDecodeError, RecursionError):
        yield tomllib.loads(f"value = {text}")["value"]
    with contextlib.suppress(json.JSONDecodeError, RecursionError):
        yield json.loads(text)
    yield [part.strip() for part in text.split(",") if part.strip()]

"""What is wrong with settings, told as the user wrote them.

Contract: one line a key, ``source: what is wrong; what would be right``; never a type or path of pydantic's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from mini_infer.suggestions import did_you_mean, nearest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pydantic import ValidationError
    from pydantic_core import ErrorDetails


def error_lines(
    error: ValidationError, model: type[BaseModel], sources: Mapping[str, str], prefix: str = ""
) -> list[str]:
    """Returns one line for each wrong key.

    Args:
        error: what pydantic found.
        model: the settings class that was validated.
        sources: the origin of each value by dotted key.
        prefix: the table that the model is mounted at, such as ``plugin.prefix-cache``.
    """
    wrong: dict[str, list[str]] = {}
    inputs: dict[str, Any] = {}
    for detail in error.errors():
        path = _path(detail, model)
        key = ".".join([prefix, *path] if prefix else path)
        if detail["type"] == "extra_forbidden":
            wrong[key] = [f"unknown key '{key}'{_instead(path, model)}"]
        else:
            wrong.setdefault(key, []).append(_expected(detail))
            inputs.setdefault(key, detail["input"])
    lines = []
    for key, messages in wrong.items():
        text = " or ".join(dict.fromkeys(messages)).replace(" or should be ", " or ")
        if key in inputs:
            text = f"'{key}' {text}, not {inputs[key]!r:.200}"
        lines.append(f"{_source(key, sources)}: {text}")
    return lines


def _path(detail: ErrorDetails, model: type[BaseModel]) -> list[str]:
    """The keys that the user wrote: the location without union tags and positions in lists."""
    path: list[str] = []
    inner: Any = model
    for part in detail["loc"]:
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            break
        path.append(str(part))
        field = inner.model_fields.get(str(part))
        inner = field.annotation if field is not None else None
    return path


def _expected(detail: ErrorDetails) -> str:
    if detail["type"] == "missing":
        return "is missing"
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    if detail["type"] == "tuple_type":
        return "should be a list"
    if detail["type"] == "string_pattern_mismatch":
        return f"should match {detail['ctx']['pattern']}"
    return detail["msg"].removeprefix("Input ").partition(", unable")[0]


def _instead(path: list[str], model: type[BaseModel]) -> str:
    siblings = model
    for part in path[:-1]:
        annotation = siblings.model_fields[part].annotation
        assert isinstance(annotation, type)
        siblings = annotation
    if nearest(path[-1], siblings.model_fields) is None:
        elsewhere = [key for key in _keys(model) if key.rpartition(".")[2] == path[-1]]
        if elsewhere:
            return f"; did you mean '{elsewhere[0]}'?"
    return did_you_mean(path[-1], siblings.model_fields)


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _keys(field.annotation, f"{prefix}{name}.")


def _source(key: str, sources: Mapping[str, str]) -> str:
    """The origin of the value, else of the first value inside it, else of the table around it."""
    while key and key not in sources:
        inside = next((source for other, source in sources.items() if other.startswith(f"{key}.")), None)
        if inside is not None:
            return inside
        key = key.rpartition(".")[0]
    return sources.get(key, "default")

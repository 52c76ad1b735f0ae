"""Line numbers of the keys of a TOML document, which tomllib does not tell.

Contract: the document is valid TOML (tomllib has read it). Statements are found by asking tomllib how many lines make
one, so strings and arrays over several lines, quoted and dotted keys need no grammar here.
"""

import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

Key = tuple[str, ...]


def key_lines(text: str) -> dict[Key, int]:
    """Returns for each key and table, as a path from the root, the line (from 1) where it is first written."""
    lines: dict[Key, int] = {}
    table: Key = ()
    for number, statement in _statements(text.splitlines()):
        if statement.lstrip().startswith("["):
            table = max(_paths(tomllib.loads(statement)), key=len)
            lines.setdefault(table, number)
        else:
            for path in _paths(tomllib.loads(statement)):
                lines.setdefault(table + path, number)
    return lines


def _statements(lines: list[str]) -> Iterator[tuple[int, str]]:
    start = 0
    while start < len(lines):
        end = start + 1
        while not _is_complete("\n".join(lines[start:end])):
            end += 1
        statement = "\n".join(lines[start:end])
        if tomllib.loads(statement):
            yield start + 1, statement
        start = end


def _is_complete(statement: str) -> bool:
    try:
        tomllib.loads(statement)
    except tomllib.TOMLDecodeError:
        return False
    return True


def _paths(table: Mapping[str, Any], prefix: Key = ()) -> Iterator[Key]:
    for name, value in table.items():
        yield (*prefix, name)
        inner = value[0] if isinstance(value, list) and value else value
        if isinstance(inner, dict):
            yield from _paths(inner, (*prefix, name))

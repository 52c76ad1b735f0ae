"""OpenAI chat messages and tools, checked and brought into the one shape that chat templates expect.

Contract: the result holds plain JSON only, is a copy, and every ``content`` in it is a string: null becomes "" (a
template never prints the word None) and text parts are joined as they are. Anything else that a client can send is a
``RequestError`` with ``param`` ``messages`` or ``tools``.

Source: https://platform.openai.com/docs/api-reference/chat/create; templates expect tool arguments as an object
(https://huggingface.co/docs/transformers/chat_extras), clients send them as JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mini_infer.errors import RequestError

ROLES = ("assistant", "developer", "function", "system", "tool", "user")
"""Templates may build control tokens of a role (``'<|' + role + '|>'``), so no other word is let through."""

MAX_DEPTH = 64
"""How deep JSON inside a message or tool may nest."""

_TEXT_OF_PART = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def normalise_messages(messages: object) -> list[dict[str, Any]]:
    """Check a chat and bring it into the templates' shape.

    Raises:
        RequestError: ``messages`` is no list of at least one message, or a message has an unknown role, a part that
            is not text, or something that is not JSON.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        raise _error("messages must be a list of at least one message")
    return [_message(index, message) for index, message in enumerate(messages)]


def normalise_tools(tools: object) -> list[dict[str, Any]] | None:
    """Check the tool definitions; none at all and an empty list are both None, as templates expect.

    Raises:
        RequestError: it is no list of JSON objects.
    """
    if not tools:
        return None
    if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RequestError("tools must be a list of objects", param="tools")
    return [plain_json(tool, "tools") for tool in tools]


def plain_json(value: object, param: str, depth: int = 0) -> Any:
    """A copy of ``value`` made of exact JSON types, so that a template meets no method but theirs.

    Raises:
        RequestError: it holds another type, or nests deeper than ``MAX_DEPTH``; ``param`` is the field at fault.
    """
    if depth > MAX_DEPTH:
        raise RequestError(f"{param} is nested deeper than {MAX_DEPTH} levels", param=param)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain_json(item, param, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(item, param, depth + 1) for item in value]
    raise RequestError(f"{param} holds a {type(value).__name__}, which is not JSON", param=param)


def _message(index: int, message: object) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise _error(f"{where} must be an object with 'role' and 'content'")
    role = message.get("role")
    if role not in ROLES:
        raise _error(f"{where}.role must be one of {', '.join(ROLES)}, not {_shown(role)}")
    checked: dict[str, Any] = {
        key: plain_json(value, "messages") for key, value in message.items() if value is not None
    }
    checked["content"] = _content(where, checked.get("content"))
    if "tool_calls" in checked:
        checked["tool_calls"] = [_tool_call(where, call) for call in _list(where, checked["tool_calls"])]
    return checked


def _content(where: str, content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _error(f"{where}.content must be a string, a list of parts or null")
    return "".join(_part(f"{where}.content[{index}]", part) for index, part in enumerate(content))


def _part(where: str, part: object) -> str:
    if not isinstance(part, dict):
        raise _error(f"{where} must be an object with a 'type'")
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in _TEXT_OF_PART:
        raise _error(f"{where}.type {_shown(kind)} is not supported: this model takes text parts only")
    text = part.get(_TEXT_OF_PART[kind])
    if not isinstance(text, str):
        raise _error(f"{where}.{_TEXT_OF_PART[kind]} must be a string")
    return text


def _tool_call(where: str, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _error(f"{where}.tool_calls must hold objects with function.name and function.arguments")
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(arguments: object) -> object:
    """JSON text of an object as that object; anything else as it is."""
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
        return plain_json(parsed, "messages") if isinstance(parsed, dict) else arguments
    return arguments


def _list(where: str, value: object) -> list[object]:
    if not isinstance(value, list):
        raise _error(f"{where}.tool_calls must be a list")
    return value


def _shown(value: object) -> str:
    return repr(value)[:60]


def _error(message: str) -> RequestError:
    return RequestError(message, param="messages")

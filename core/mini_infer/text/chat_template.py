"""A model's chat template, run in a sandbox with limits.

Contract: the text is what transformers renders for the same template and values. Whatever a template does with the
messages (refuse them, fail by type, loop, recurse or write without end), the outcome is a text or a ``RequestError``,
soon; renderings in other threads are not touched.

Source: the template environment that model authors write for,
https://huggingface.co/docs/transformers/chat_templating_writing.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
from jinja2 import ext, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mini_infer.errors import RequestError, in_one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from jinja2.parser import Parser
    from jinja2.runtime import Context

MAX_STEPS = 1_000_000
"""How many rounds of loops one rendering may take; a call counts as ``STEPS_PER_CALL``. About half a second."""

STEPS_PER_CALL = 10

MAX_CHARACTERS = 32 * 2**20
"""Length of the text that one rendering may write."""

MAX_MESSAGE = 300
"""A template's own error message is cut to this many characters."""

_BUDGET = "_mini_infer_budget"
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", _BUDGET})


class _RefusedByTemplateError(jinja2.TemplateError):
    """The template called ``raise_exception``."""


class _BudgetSpentError(Exception):
    """The template did more than a rendering may."""


class ChatTemplate:
    """One compiled template; use it for any number of requests.

    Args:
        source: the Jinja text.

    Raises:
        RequestError: the source is no valid template.
    """

    def __init__(self, source: str) -> None:
        self._environment = _Environment()
        try:
            tree = self._environment.parse(source)
            self.literals = _literals(tree)
            """The texts that the template itself writes."""
            self._template = self._environment.template_of(tree)
        except jinja2.TemplateError as error:
            raise _error(f"the model's chat template is not valid: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The chat as one text.

        Args:
            messages: as ``normalise_messages`` returns them.
            tools: as ``normalise_tools`` returns them.
            add_generation_prompt: end with what opens an assistant's turn.
            variables: what else the template may read, such as ``bos_token`` or ``enable_thinking``.

        Raises:
            RequestError: the template refused the messages (its message is given), failed, or did not come to an end.
        """
        if taken := sorted(_RESERVED & variables.keys()):
            raise RequestError(f"chat template variable '{taken[0]}' is reserved", param="chat_template_kwargs")
        budget = _Budget()
        try:
            return budget.join(
                self._template.generate(
                    {
                        **variables,
                        "messages": messages,
                        "tools": tools,
                        "add_generation_prompt": add_generation_prompt,
                        _BUDGET: budget,
                    }
                )
            )
        except _RefusedByTemplateError as error:
            raise _error(f"the chat template refused the messages: {error}") from error
        except _BudgetSpentError as error:
            raise _error(f"the chat template did not come to an end: {error}") from error
        except Exception as error:  # templates are programs: any exception can come out of them
            raise _error(f"the chat template failed on these messages: {in_one_line(error)}") from error


class _Budget:
    """Counts what one rendering does."""

    def __init__(self) -> None:
        self._steps = 0

    def spend(self, steps: int) -> None:
        self._steps += steps
        if self._steps > MAX_STEPS:
            raise _BudgetSpentError(f"more than {MAX_STEPS} steps in its loops and calls")

    def each(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.spend(1)
            yield item

    def join(self, pieces: Iterable[str]) -> str:
        written, length = [], 0
        for piece in pieces:
            length += len(piece)
            if length > MAX_CHARACTERS:
                raise _BudgetSpentError(f"more than {MAX_CHARACTERS} characters")
            written.append(piece)
        return "".join(written)


class _Environment(ImmutableSandboxedEnvironment):
    """What model authors may count on: the documented filters and functions, block trimming, loop controls."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols, _GenerationBlocks])
        self.filters["tojson"] = _tojson
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)

    def template_of(self, tree: nodes.Template) -> jinja2.Template:
        """Compile ``tree`` with each loop's items passed through the budget."""
        for loop in list(tree.find_all(nodes.For)):
            budget = nodes.Name(_BUDGET, "load")
            each = nodes.Getattr(budget, "each", "load")
            loop.iter = nodes.Call(each, [loop.iter], [], None, None)
            loop.iter.set_lineno(loop.lineno)
            loop.iter.set_environment(self)
        return self.template_class.from_code(self, self.compile(tree), self.make_globals(None))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 (as in jinja2)
        __context[_BUDGET].spend(STEPS_PER_CALL)
        return super().call(__context, __obj, *args, **kwargs)


class _GenerationBlocks(ext.Extension):
    """``{% generation %}`` marks assistant text for training; here it is the text inside."""

    tags = {"generation"}  # noqa: RUF012 (as in jinja2)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _literals(tree: nodes.Template) -> frozenset[str]:
    constants = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return frozenset(constants | {node.data for node in tree.find_all(nodes.TemplateData)})


def _raise_exception(message: object) -> NoReturn:
    raise _RefusedByTemplateError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _error(message: str) -> RequestError:
    if len(message) > MAX_MESSAGE:
        message = message[: MAX_MESSAGE - 1] + "…"
    return RequestError(message, param="messages", code="chat_template_error")

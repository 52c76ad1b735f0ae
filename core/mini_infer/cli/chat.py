"""``mini-infer chat``: a conversation in the terminal, the answer appearing as it is made."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from mini_infer.cli.common import (
    PlainCommand,
    open_llm,
    read_sampling,
    read_settings,
    sampling_options,
    settings_options,
)
from mini_infer.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mini_infer.llm import LLM
    from mini_infer.sampling_params import SamplingParams

HELP = "/new starts over, /quit or Ctrl-D ends; Ctrl-C stops an answer."


@click.command(cls=PlainCommand)
@click.option("--system", help="What the model is told before the conversation.")
@click.option("--verbose", "-v", is_flag=True, help="Write the start log to stderr.")
@sampling_options
@settings_options
def chat(
    system: str | None,
    verbose: bool,
    max_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    seed: int | None,
    stop: tuple[str, ...],
    **options: Any,
) -> None:
    """Talk to a model. Lines come from stdin, so a script can talk too."""
    settings = read_settings(**options)
    with open_llm(settings, verbose=verbose) as llm:
        given = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed, "stop": stop}
        params = read_sampling(llm, given)
        opening = [{"role": "system", "content": system}] if system else []
        messages = list(opening)
        if sys.stdin.isatty():
            click.echo(f"{llm.frontend.facts.name}. {HELP}", err=True)
        for line in _lines():
            if line == "/quit":
                break
            if line == "/new":
                messages = list(opening)
            elif line:
                messages.append({"role": "user", "content": line})
                messages.append({"role": "assistant", "content": _answer(llm, messages, params)})


def _lines() -> Iterator[str]:
    """What the user enters, with editing and history where there is a terminal."""
    prompt = "> " if sys.stdin.isatty() else ""
    if prompt:
        import readline  # noqa: F401 (gives `input` editing and history)
    while True:
        try:
            yield input(prompt).strip()
        except (EOFError, KeyboardInterrupt):
            return


def _answer(llm: LLM, messages: list[dict[str, str]], params: SamplingParams) -> str:
    """Prints the answer as it comes and returns it; Ctrl-C keeps what was there."""
    pieces: list[str] = []
    stream = llm.stream_chat(messages, params)
    try:
        for delta in stream:
            if delta.error is not None:
                raise RequestError(delta.error)
            pieces.append(delta.text)
            click.echo(delta.text, nl=False)
    except KeyboardInterrupt:
        pass
    finally:
        click.echo()
    return "".join(pieces)

"""``mini-infer generate``: answers to prompts, printed when all are there."""

from __future__ import annotations

import sys
from typing import Any

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


@click.command(cls=PlainCommand)
@click.argument("prompts", nargs=-1)
@click.option("--chat", "as_chat", is_flag=True, help="Put each prompt through the model's chat template.")
@click.option("--verbose", "-v", is_flag=True, help="Write the start log to stderr.")
@sampling_options
@settings_options
def generate(
    prompts: tuple[str, ...],
    as_chat: bool,
    verbose: bool,
    max_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    seed: int | None,
    stop: tuple[str, ...],
    **options: Any,
) -> None:
    """Print the continuation of each PROMPT.

    Without PROMPTS, of the text that comes on stdin.
    """
    if not prompts:
        prompts = ("" if sys.stdin is None else sys.stdin.read(),)  # None where it was closed
    if not all(prompts):
        raise RequestError("a prompt is empty: give some text")
    settings = read_settings(**options)
    with open_llm(settings, verbose=verbose) as llm:
        given = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed, "stop": stop}
        params = read_sampling(llm, given)
        if as_chat:
            outputs = llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], params)
        else:
            outputs = llm.generate(list(prompts), params)
    for output in outputs:
        answer = output.outputs[0]
        if answer.error is not None:
            raise RequestError(answer.error)
        click.echo(answer.text)

"""What commands share: plain errors, and options that become settings.

Contract: an option given on the command line outranks environment and file; ``--set`` outranks the option.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from mini_infer.errors import ConfigError, MiniInferError, PluginError, RequestError
from mini_infer.openmp import wait_briefly

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mini_infer.llm import LLM
    from mini_infer.sampling_params import SamplingParams
    from mini_infer.settings import Settings

F = TypeVar("F", bound="Callable[..., Any]")


class PlainCommand(click.Command):
    """A command whose ``MiniInferError`` is told in plain lines, and whose CPU threads leave shared cores in peace."""

    def invoke(self, ctx: click.Context) -> Any:
        wait_briefly(os.environ)
        try:
            return super().invoke(ctx)
        except MiniInferError as e:
            click.echo(str(e), err=True)
            users_fault = isinstance(e, ConfigError | PluginError | RequestError)
            raise click.exceptions.Exit(2 if users_fault else 1) from e


def settings_options(command: F) -> F:
    """Adds the options that every command with settings takes."""
    for option in (
        click.option("--plugins", "plugin_names", metavar="A,B", help="Plugins and sets, in order."),
        click.option("--model", "-m", help="A Hugging Face id, a local folder, a .gguf file, or demo."),
        click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Any setting; may be repeated."),
        click.option(
            "--config", type=click.Path(path_type=Path), help="Settings file; else ./mini-infer.toml if there."
        ),
    ):
        command = option(command)
    return command


def read_settings(
    *,
    config: Path | None,
    sets: Sequence[str],
    model: str | None,
    plugin_names: str | None,
    server: Mapping[str, Any] | None = None,
) -> Settings:
    """Resolves the settings that the options of a command ask for.

    Raises:
        ConfigError: a setting is wrong.
    """
    from mini_infer.settings import load_settings

    overrides = {}
    for item in sets:
        key, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(f"--set {item}: write KEY=VALUE, such as --set engine.dtype=float32")
        overrides[key.strip()] = value.strip()
    names = None if plugin_names is None else [name.strip() for name in plugin_names.split(",") if name.strip()]
    arguments = {"model": model, "plugins": names, "server": dict(server or {})}
    return load_settings(config=config, overrides=overrides, arguments=arguments, argument_source="command line")


def open_llm(settings: Settings, *, verbose: bool = False) -> LLM:
    """Builds an engine in this process; ``verbose`` writes its start log to stderr.

    Raises:
        MiniInferError: the engine cannot be built.
    """
    from mini_infer.build import build_engine
    from mini_infer.llm import LLM

    built = build_engine(settings)
    for line in built.log if verbose else ():
        click.echo(line, err=True)
    return LLM.from_engine(built, seed=settings.engine.seed)


def sampling_options(command: F) -> F:
    """Adds the options of sampling that people set by hand."""
    for option in (
        click.option("--stop", multiple=True, help="Ends the text; may be repeated."),
        click.option("--seed", type=int, help="The same seed gives the same text."),
        click.option("--top-p", type=float, help="Smallest set of tokens of that probability."),
        click.option("--temperature", type=float, help="0 is greedy. Default: the model's own."),
        click.option("--max-tokens", type=int, help="Most tokens to generate. Default: all that fit."),
    ):
        command = option(command)
    return command


def read_sampling(llm: LLM, given: Mapping[str, Any]) -> SamplingParams:
    """Returns the sampling parameters given, the model's own defaults for the rest.

    Raises:
        RequestError: a value is out of range.
    """
    values = {name: value for name, value in given.items() if value is not None}
    return llm.frontend.sampling_params(**{"max_tokens": None, **values})


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints columns under a header, wrapped to a terminal's width, and never for a pipe or file."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*header, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console(width=None if sys.stdout.isatty() else 10_000)
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().splitlines():
        click.echo(line.rstrip())

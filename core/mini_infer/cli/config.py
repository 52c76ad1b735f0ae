"""``mini-infer config``: what each setting is, where it came from, and what could be set."""

from __future__ import annotations

import json
from typing import Any

import click

from mini_infer.cli.common import PlainCommand, read_settings, settings_options


@click.group()
def config() -> None:
    """Explain the settings in effect, or print their schema."""


@config.command(cls=PlainCommand)
@settings_options
def explain(**options: Any) -> None:
    """Print each effective value, its source, and for each "auto" the choice, the alternatives and why they lost."""
    from mini_infer.cli.explain import print_engine, print_values

    settings = read_settings(**options)
    print_values(settings)
    print_engine(settings)


@config.command(cls=PlainCommand)
def schema() -> None:
    """Print the JSON Schema of the settings file, with the tables of all installed plugins."""
    from mini_infer.settings.json_schema import settings_schema

    result, skipped = settings_schema()
    for line in skipped:
        click.echo(line, err=True)
    click.echo(json.dumps(result, indent=2))

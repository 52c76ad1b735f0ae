"""``mini-infer demo-path``: where the demo model lies as a plain Hugging Face folder."""

from __future__ import annotations

from typing import Any

import click

from mini_infer.cli.common import PlainCommand, read_settings, settings_options


@click.command("demo-path", cls=PlainCommand)
@settings_options
def demo_path(**options: Any) -> None:
    """Print the demo model's folder.

    It is made at the first call; transformers loads it too.
    """
    from mini_infer.build import compose

    found = compose(read_settings(**options)).found
    click.echo(found.loader.prepare(found.path))

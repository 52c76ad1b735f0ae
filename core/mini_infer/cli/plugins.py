"""``mini-infer plugins``: what is installed, what is enabled, and why not."""

from __future__ import annotations

from typing import Any

import click

from mini_infer.cli.common import PlainCommand, make_console, read_settings, settings_options


@click.command(cls=PlainCommand)
@settings_options
def plugins(**options: Any) -> None:
    """List what is installed, what is enabled, and why not."""
    from rich.table import Table

    from mini_infer.device import resolve_device
    from mini_infer.plugin_rows import describe_plugins

    settings = read_settings(**options)
    device, _ = resolve_device(settings.engine.device)
    table = Table("name", "version", "source", "provides", "enabled", "why", box=None, pad_edge=False)
    for row in describe_plugins(settings, device):
        provides = ", ".join(row.provides) or "-"
        table.add_row(row.name, row.version or "-", row.source, provides, "yes" if row.enabled else "no", row.why)
    make_console().print(table)

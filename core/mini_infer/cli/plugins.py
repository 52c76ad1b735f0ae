"""``mini-infer plugins``: what is installed, what is enabled, and why not."""

from __future__ import annotations

from typing import Any

import click

from mini_infer.cli.common import PlainCommand, print_table, read_settings, settings_options


@click.command(cls=PlainCommand)
@settings_options
def plugins(**options: Any) -> None:
    """List what is installed, what is enabled, and why not."""
    from mini_infer.build.device import resolve_device
    from mini_infer.plugin_system.rows import describe_plugins
    from mini_infer.plugin_system.sets import PLUGIN_SETS

    settings = read_settings(**options)
    device, _ = resolve_device(settings.engine.device)
    rows = [
        (
            row.name,
            row.version or "-",
            row.source,
            ", ".join(row.provides) or "-",
            "yes" if row.enabled else "no",
            row.why,
        )
        for row in describe_plugins(settings, device)
    ]
    print_table(("name", "version", "source", "provides", "enabled", "why"), rows)
    click.echo()
    kind = device.partition(":")[0]
    sets = [(name, ", ".join(s.members.get(kind, ())) or "-", s.what) for name, s in PLUGIN_SETS.items()]
    print_table(("set", f"plugins on {kind}", "what"), sets)

"""``mini-infer serve``: the OpenAI API over an engine in a process of its own.

Contract: the core knows no server. The one installed is found by the entry point group ``mini_infer.server``, a
function that takes the settings and returns when the server has ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from mini_infer.cli.common import PlainCommand, read_settings, settings_options
from mini_infer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mini_infer.settings import Settings

GROUP = "mini_infer.server"


@click.command(cls=PlainCommand)
@click.option("--host", help="Address to listen on. Default: 127.0.0.1.")
@click.option("--port", type=int, help="Port to listen on; 0 takes any free one. Default: 8000.")
@click.option("--dry-run", is_flag=True, help="Build everything, load nothing, print the composed engine.")
@settings_options
def serve(host: str | None, port: int | None, dry_run: bool, **options: Any) -> None:
    """Serve a model over HTTP, as the OpenAI API."""
    settings = read_settings(**options, server={"host": host, "port": port})
    if dry_run:
        from mini_infer.cli.explain import print_engine

        print_engine(settings)
    else:
        find_server()(settings)


def find_server() -> Callable[[Settings], None]:
    """Imports the installed server.

    Raises:
        ConfigError: none is installed, or a library that it needs is missing.
    """
    from importlib.metadata import entry_points

    remedy = "install it with: pip install 'mini-infer[server]'"
    for point in entry_points(group=GROUP):
        try:
            server: Callable[[Settings], None] = point.load()
        except ModuleNotFoundError as e:
            raise ConfigError(f"the server needs {e.name}, which is not installed: {remedy}") from e
        return server
    raise ConfigError(f"no server is installed: {remedy}")

"""The group ``mini-infer``. Contract: it only gathers the commands."""

import click

from mini_infer.cli.bench import bench
from mini_infer.cli.chat import chat
from mini_infer.cli.config import config
from mini_infer.cli.demo import demo_path
from mini_infer.cli.generate import generate
from mini_infer.cli.plugins import plugins
from mini_infer.cli.serve import serve


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="mini-infer")
def main() -> None:
    """An LLM inference engine in which every optimisation is a plugin."""


for command in (serve, generate, chat, bench, plugins, config, demo_path):
    main.add_command(command)

"""``mini-infer demo-path``: where the demo model lies as a plain Hugging Face folder."""

from __future__ import annotations

import click

from mini_infer.cli.common import PlainCommand


@click.command("demo-path", cls=PlainCommand)
@click.option("--family", type=click.Choice(["llama", "qwen2"]), default="llama", show_default=True)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
def demo_path(family: str, dtype: str) -> None:
    """Print the demo model's folder.

    It is made at the first call; transformers loads it too. As qwen2 it has the same weights and logits.
    """
    from mini_infer.model.demo import demo_path as find

    click.echo(find(family, dtype))

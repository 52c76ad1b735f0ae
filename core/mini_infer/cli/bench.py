"""``mini-infer bench``: how fast this machine runs a model, in three figures that users ask for.

Contract: random token ids and greedy decoding, so that figures of different engines and models compare; a warm-up
before anything is measured.
"""

from __future__ import annotations

import json
from typing import Any

import click

from mini_infer.cli.common import PlainCommand, open_llm, print_table, read_settings, settings_options

COUNT = click.IntRange(min=1)


@click.group()
def bench() -> None:
    """Measure latency, throughput, or a running server."""


def _lengths(command: Any) -> Any:
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table."),
        click.option(
            "--output-len", default=128, type=COUNT, show_default=True, help="Tokens to generate for each request."
        ),
        click.option("--input-len", default=128, type=COUNT, show_default=True, help="Tokens of each prompt."),
    ):
        command = option(command)
    return command


@bench.command(cls=PlainCommand)
@click.option("--batch-size", default=1, type=COUNT, show_default=True, help="Requests at once.")
@click.option("--iterations", default=3, type=COUNT, show_default=True, help="Times to measure; the best counts.")
@_lengths
@settings_options
def latency(batch_size: int, iterations: int, input_len: int, output_len: int, as_json: bool, **options: Any) -> None:
    """Time of one batch of equal requests."""
    from mini_infer.cli.bench_engine import measure_latency

    with open_llm(read_settings(**options)) as llm:
        figures = measure_latency(llm, batch_size, input_len, output_len, iterations)
    _print(figures, as_json)


@bench.command(cls=PlainCommand)
@click.option("--num-prompts", default=64, type=COUNT, show_default=True, help="Requests, all there at once.")
@_lengths
@settings_options
def throughput(num_prompts: int, input_len: int, output_len: int, as_json: bool, **options: Any) -> None:
    """Tokens a second over many requests of mixed length, up to the lengths given."""
    from mini_infer.cli.bench_engine import measure_throughput

    with open_llm(read_settings(**options)) as llm:
        figures = measure_throughput(llm, num_prompts, input_len, output_len)
    _print(figures, as_json)


@bench.command(cls=PlainCommand)
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="A server of the OpenAI API.")
@click.option("--model", help="The model's name there. Default: the server's first.")
@click.option("--api-key", help="Sent as a bearer token.")
@click.option("--num-prompts", default=32, type=COUNT, show_default=True, help="Requests in all.")
@click.option("--concurrency", default=8, type=COUNT, show_default=True, help="Requests at once.")
@_lengths
def serve(
    url: str,
    model: str | None,
    api_key: str | None,
    num_prompts: int,
    concurrency: int,
    input_len: int,
    output_len: int,
    as_json: bool,
) -> None:
    """Streams from a running server: TTFT, ITL, TPOT, tokens a second."""
    import asyncio

    from mini_infer.cli.bench_server import measure_server

    run = measure_server(url, model, api_key, num_prompts, concurrency, input_len, output_len)
    _print(asyncio.run(run), as_json)


def _print(figures: dict[str, float], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(figures))
        return
    rows = [(name, f"{value:,.2f}" if isinstance(value, float) else f"{value:,}") for name, value in figures.items()]
    print_table(("figure", "value"), rows)

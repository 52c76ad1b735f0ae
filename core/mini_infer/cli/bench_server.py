"""Measurements on a running server, over its streams.

Contract: a fixed number of clients each send the next request when their last has ended (a closed loop). A request
that fails ends the measurement: figures over failed requests mean nothing. TTFT is from sending to the first piece, ITL
the gap between consecutive pieces, TPOT (last piece - first piece) / (tokens - 1) of a request.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mini_infer.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import httpx

# Ids that stand for plain text in every usual vocabulary: past the control tokens, below 256.
PLAIN_IDS = range(100, 250)


@dataclass(slots=True)
class Stream:
    """When the pieces of one answer arrived, in seconds of ``time.perf_counter``."""

    sent: float
    arrivals: list[float]
    num_tokens: int = 0


async def measure_server(
    url: str,
    model: str | None,
    api_key: str | None,
    num_prompts: int,
    concurrency: int,
    input_len: int,
    output_len: int,
) -> dict[str, float]:
    """Returns the figures of all requests together.

    Raises:
        ConfigError: httpx is not installed.
        EngineError: the server cannot be reached, or a request failed.
    """
    try:
        import httpx
    except ModuleNotFoundError as e:
        raise ConfigError("bench serve needs httpx, which is not installed: pip install httpx") from e
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=None) as client:
        try:
            name = model or (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
            bodies = list(_bodies(name, num_prompts + 1, input_len, output_len))
            await _stream(client, bodies.pop())
            start = time.perf_counter()
            with _bar(len(bodies)) as done:
                streams = await _closed_loop(client, bodies, concurrency, done)
        except httpx.HTTPError as e:
            raise EngineError(f"{url}: {e or type(e).__name__}") from e
    return _figures(streams, time.perf_counter() - start)


def _bodies(model: str, count: int, input_len: int, output_len: int) -> Iterator[dict[str, Any]]:
    draw = random.Random(0)
    for _ in range(count):
        yield {
            "model": model,
            "prompt": draw.choices(PLAIN_IDS, k=input_len),
            "max_tokens": output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


async def _closed_loop(
    client: httpx.AsyncClient, bodies: list[Any], concurrency: int, done: Callable[[], None]
) -> list[Stream]:
    streams: list[Stream] = []

    async def work() -> None:
        while bodies:
            streams.append(await _stream(client, bodies.pop()))
            done()

    await asyncio.gather(*(work() for _ in range(concurrency)))
    return streams


@contextmanager
def _bar(total: int) -> Iterator[Callable[[], None]]:
    """A bar over requests where stderr is a terminal; gives a function to call when one has ended."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring", total=total)
        yield lambda: progress.advance(task)


async def _stream(client: httpx.AsyncClient, body: Any) -> Stream:
    stream = Stream(time.perf_counter(), [])
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise EngineError(f"the server failed: {chunk['error'].get('message')}")
            if chunk.get("choices"):
                stream.arrivals.append(time.perf_counter())
            if chunk.get("usage"):
                stream.num_tokens = chunk["usage"]["completion_tokens"]
    if not stream.arrivals:
        raise EngineError("the server ended a stream without an answer")
    return stream


def _figures(streams: list[Stream], seconds: float) -> dict[str, float]:
    first = [1e3 * (stream.arrivals[0] - stream.sent) for stream in streams]
    gaps = [
        1e3 * (late - early)
        for stream in streams
        for early, late in zip(stream.arrivals, stream.arrivals[1:], strict=False)
    ]
    each = [
        1e3 * (stream.arrivals[-1] - stream.arrivals[0]) / (stream.num_tokens - 1)
        for stream in streams
        if stream.num_tokens > 1
    ]
    figures = {
        "requests": float(len(streams)),
        "requests/s": len(streams) / seconds,
        "output, tok/s": sum(stream.num_tokens for stream in streams) / seconds,
    }
    for name, values in (("TTFT", first), ("ITL", gaps), ("TPOT", each)):
        if values:
            figures[f"{name}, ms, median"] = statistics.median(values)
            figures[f"{name}, ms, longest"] = max(values)
    return figures

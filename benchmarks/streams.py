"""Closed-loop HTTP clients against a server that is started here and ended here.

Contract: every client streams chat completions, sending its next request when the last is answered. A request counts if
it gave all its tokens; anything else fails the run. Only loopback is used.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import IO

import httpx

from benchmarks.demo_folder import demo_folder
from benchmarks.workloads import Workload

SERVERS = ("mini-infer-serve", "transformers-serve")


def run(engine: str, workload: Workload, repeats: int, threads: int) -> list[float]:
    """Seconds for all requests of the workload, one entry a repeat, after one round to warm up."""
    with _server(engine, threads) as base_url:
        _round(engine, base_url, workload)
        return [_round(engine, base_url, workload) for _ in range(repeats)]


def _command(engine: str, port: int) -> list[str]:
    if engine == "mini-infer-serve":
        without = ["--set", 'without=["prefix-cache"]']  # the same prompts come again in each round
        return [sys.executable, "-m", "mini_infer", "serve", "--port", str(port), *without]
    if engine == "transformers-serve":
        options = ["--device", "cpu", "--dtype", "float32", "--port", str(port), "--continuous-batching"]
        options += ["--cb-block-size", "32", "--cb-num-blocks", "512", "--cb-max-batch-tokens", "512"]
        return [sys.executable, "-m", "transformers.cli.transformers", "serve", demo_folder(), *options]
    raise SystemExit(f"no server {engine!r}; there are {', '.join(SERVERS)}")


@contextlib.contextmanager
def _server(engine: str, threads: int) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    base_url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:  # a pipe that nobody reads would stop a server that says much
        process = subprocess.Popen(
            _command(engine, port), env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            _wait(process, base_url, log)
            yield base_url
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended by itself
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        os.killpg(process.pid, signal.SIGKILL)


def _wait(process: subprocess.Popen[bytes], base_url: str, log: IO[bytes]) -> None:
    for _ in range(1200):
        if process.poll() is not None:
            log.seek(0)
            raise SystemExit(f"the server ended: {log.read().decode(errors='replace')[-2000:]}")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{base_url}/health").status_code == 200:
                return
        time.sleep(0.1)
    raise SystemExit("the server did not come up within two minutes")


def _body(engine: str, prompt_len: int, output_len: int, index: int) -> dict[str, object]:
    words = " ".join(str((index * 7919 + i * 104729) % 1000) for i in range(prompt_len // 4))
    body: dict[str, object] = {
        "model": "demo" if engine == "mini-infer-serve" else demo_folder(),
        "messages": [{"role": "user", "content": f"Write a long story about these numbers: {words}"}],
        "stream": True,
        "temperature": 0.0,
        "max_tokens": output_len,
    }
    if engine == "mini-infer-serve":
        body["ignore_eos"] = True
        body["stream_options"] = {"include_usage": True}
    return body


def _round(engine: str, base_url: str, workload: Workload) -> float:
    bodies = [
        _body(engine, p, o, i) for i, (p, o) in enumerate(zip(workload.prompt_lens, workload.output_lens, strict=True))
    ]

    async def client(http: httpx.AsyncClient, queue: list[dict[str, object]]) -> int:
        tokens = 0
        while queue:
            tokens += await _stream(http, base_url, queue.pop())
        return tokens

    async def everything() -> float:
        async with httpx.AsyncClient(timeout=300) as http:
            queue = list(bodies)
            started = time.perf_counter()
            tokens = sum(await asyncio.gather(*(client(http, queue) for _ in range(workload.clients))))
            elapsed = time.perf_counter() - started
        # Seconds as if every request had given all its tokens: a server that stops at EOS is not thereby faster.
        return elapsed * workload.num_output_tokens / tokens

    return asyncio.run(everything())


async def _stream(http: httpx.AsyncClient, base_url: str, body: dict[str, object]) -> int:
    chunks = 0
    usage = None
    async with http.stream("POST", f"{base_url}/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise SystemExit(f"HTTP {response.status_code}: {(await response.aread()).decode()[:500]}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            chunks += any(choice.get("delta", {}).get("content") for choice in event.get("choices", ()))
    tokens = usage["completion_tokens"] if usage else chunks
    if not tokens:
        raise SystemExit("a request gave no tokens")
    return int(tokens)

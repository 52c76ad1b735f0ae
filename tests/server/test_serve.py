"""``mini-infer serve`` as a whole: two processes, a real engine, and every way in which they end."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from tests.server.serving import error_of, until

from mini_infer.testing.engines import tiny_model

START_SECONDS = 120


@dataclass
class Running:
    """A server of its own."""

    process: subprocess.Popen[str]
    output: list[str]
    url: str

    @property
    def engine_pid(self) -> int:
        listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(self.process.pid)], capture_output=True, text=True)
        return int(listed.stdout.split()[0])

    def end(self) -> int:
        """Wait for the end; the exit code."""
        return self.process.wait(30)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "mini_infer", "serve", *arguments]


@contextlib.contextmanager
def running(model: Path, *arguments: str) -> Iterator[Running]:
    process = subprocess.Popen(
        command("--model", str(model), "--port", "0", *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    output: list[str] = []
    threading.Thread(target=lambda: output.extend(iter(process.stdout.readline, "")), daemon=True).start()  # type: ignore[union-attr]
    try:
        until(lambda: any("curl" in line for line in output) or process.poll() is not None, START_SECONDS)
        text = "".join(output)
        assert process.poll() is None, text
        found = re.search(r"answers at (http://127\.0\.0\.1:\d+)", text)
        assert found is not None, text
        yield Running(process, output, found[1])
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


@pytest.fixture(scope="module")
def model() -> Path:
    return tiny_model("llama", max_position_embeddings=512)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_it_answers_and_its_engine_may_die(model: Path) -> None:
    with running(model, "--set", "server.served_model_name=tiny") as server, httpx.Client(timeout=30) as http:
        text = "".join(server.output)
        assert "KV cache" in text and "engine.device" in text  # what was built
        assert http.get(f"{server.url}/health").status_code == 200
        curl = next(line for line in server.output if "curl" in line)
        assert server.url in curl and '"stream": true' in curl

        body = {"prompt": [1, 2, 3], "max_tokens": 6, "temperature": 0, "logprobs": 1, "echo": True}
        whole = http.post(f"{server.url}/v1/completions", json=body).json()["choices"][0]
        assert len(whole["logprobs"]["tokens"]) >= 4
        streamed = http.post(f"{server.url}/v1/completions", json={**body, "stream": True}).text
        events = [json.loads(line[6:]) for line in streamed.split("\n\n") if line.startswith("data: {")]
        assert "".join(event["choices"][0]["text"] for event in events) == whole["text"]

        messages = [{"role": "user", "content": "hi"}]
        seeded = {"messages": messages, "seed": 1, "n": 2, "max_tokens": 8}
        twice = [http.post(f"{server.url}/v1/chat/completions", json=seeded).json()["choices"] for _ in range(2)]
        assert twice[0] == twice[1]
        assert http.post(f"{server.url}/v1/completions", json={"prompt": [999]}).status_code == 400

        engine = server.engine_pid
        long = {"prompt": [1], "max_tokens": 500, "ignore_eos": True, "stream": True}
        with http.stream("POST", f"{server.url}/v1/completions", json=long) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(engine, signal.SIGKILL)
            killed = time.monotonic()
            errors = [line for line in lines if '"error"' in line]
        assert errors and "killed by signal 9" in errors[0]
        health = http.get(f"{server.url}/health")
        assert time.monotonic() - killed < 5
        assert health.status_code == 503 and error_of(health)["code"] == "engine_unavailable"
        assert http.post(f"{server.url}/v1/completions", json=body).status_code == 503
        assert server.end() == 1
        assert server.output[-1] == "the engine died: its process was killed by signal 9; the server has ended\n"
        assert "".join(server.output).count("the engine died") == 1 and "Traceback" not in "".join(server.output)
        assert gone(engine)


FAULTY = """
import torch
from mini_infer.plugins import hookimpl
from mini_infer.sampling.sampler import ReferenceSampler

name = "faulty"
api_version = 0


class Faulty(ReferenceSampler):
    calls = 0

    def greedy(self, *arguments):
        self.calls += 1
        if self.calls > 3:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\\nCompile with ...\\n")
        return super().greedy(*arguments)


@hookimpl
def sampler(context):
    return Faulty()
"""


def test_a_device_fault_ends_requests_and_server_with_one_line(model: Path, tmp_path: Path) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY)
    sets = ("--set", f'plugin_dirs=["{tmp_path}"]', "--plugins", "faulty")
    told = "the engine died: the device failed: CUDA error: an illegal memory access was encountered: start again; "
    with running(model, *sets) as server, httpx.Client(timeout=30) as http:
        body = {"prompt": [1, 2, 3], "max_tokens": 50, "temperature": 0, "ignore_eos": True}
        answer = http.post(f"{server.url}/v1/completions", json=body)
        assert answer.status_code >= 500 and error_of(answer)["message"].startswith(told)
        assert http.get(f"{server.url}/health").status_code == 503
        assert server.end() == 1
        after = server.output[next(i for i, line in enumerate(server.output) if "curl" in line) + 1 :]
        assert len(after) == 1 and after[0].startswith(told) and after[0].endswith("; the server has ended\n"), after


def test_sigterm_lets_running_answers_finish(model: Path) -> None:
    with running(model, "--set", "engine.skip_tokenizer=true") as server, httpx.Client(timeout=30) as http:
        engine = server.engine_pid
        body = {"prompt": [1], "max_tokens": 100, "ignore_eos": True, "stream": True}
        with http.stream("POST", f"{server.url}/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.terminate()
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.end() == 0
        assert "Traceback" not in "".join(server.output)
        assert gone(engine)


def failed(*arguments: str) -> tuple[int, str, float]:
    start = time.monotonic()
    done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr.strip() or done.stdout.strip(), time.monotonic() - start


def test_a_port_in_use_is_said_before_anything_is_loaded(model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, line, seconds = failed("--model", str(model), "--port", str(port))
    assert code == 2 and seconds < 10
    assert line == f"port {port} of 127.0.0.1 is in use: stop what listens there, or choose another with --port"


def test_a_model_that_is_not_there_is_one_plain_line() -> None:
    code, line, _ = failed("--model", "./no/such/folder", "--port", "0")
    assert code == 2
    assert "no/such/folder" in line and "Traceback" not in line and len(line.splitlines()) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_engine_never_outlives_its_server(model: Path, number: signal.Signals) -> None:
    """While it loads, too: it hears nothing then but the end of its socket."""
    process = subprocess.Popen(command("--model", str(model), "--port", "0"), stderr=subprocess.PIPE, text=True)
    server = Running(process, [], "")

    def engine_started() -> bool:
        with contextlib.suppress(IndexError):
            return server.engine_pid > 0
        return False

    until(engine_started, START_SECONDS)
    engine = server.engine_pid
    process.send_signal(number)
    _, stderr = process.communicate(timeout=30)
    assert "Traceback" not in stderr
    until(lambda: gone(engine), 10)

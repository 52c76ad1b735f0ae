"""The command line: what each command prints, plain errors, exit codes."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.core.fake_plugins import FakeDistributions

from mini_infer.choices import Choice
from mini_infer.cli import main, serve
from mini_infer.errors import ConfigError, EngineError, RequestError
from mini_infer.outputs import Delta
from mini_infer.sampling_params import SamplingParams
from mini_infer.testing.engines import tiny_model

PLUGIN = "name = '{name}'\napi_version = 0\nprovides = ('tier',)\n"
SETTINGS = "from pydantic import BaseModel\nclass Settings(BaseModel, extra='forbid'):\n    size: int = 3\n"


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith("MINI_INFER_"):
            monkeypatch.delenv(name)


def run(*arguments: str, text: str | None = None) -> Result:
    return CliRunner().invoke(main, arguments, input=text)


class FakeLLM:
    """Answers with what it was asked, in three pieces."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.params: list[SamplingParams] = []
        facts = SimpleNamespace(name="fake", vocab_size=7)
        self.frontend = SimpleNamespace(sampling_params=SamplingParams, facts=facts, tokenizer=None)
        self.error: str | None = None

    def generate(self, prompts: list[Any], params: Any) -> list[Any]:
        self.asked.append(prompts)
        self.params.append(params)
        metrics = SimpleNamespace(time_to_first_token=0.5)
        answers = [SimpleNamespace(text=f"<{prompt}>", token_ids=[1, 2], error=self.error) for prompt in prompts]
        return [SimpleNamespace(outputs=[answer], metrics=metrics) for answer in answers]

    def chat(self, chats: list[Any], params: Any) -> list[Any]:
        return self.generate([chat[-1]["content"] for chat in chats], params)

    def stream_chat(self, messages: list[Any], params: Any) -> Iterator[Delta]:
        self.asked.append([dict(message) for message in messages])
        for text in ("you ", "said ", messages[-1]["content"]):
            yield Delta(request_id="1", index=0, text=text, error=self.error)


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    fake = FakeLLM()

    @contextmanager
    def open_llm(settings: Any, **_: Any) -> Iterator[FakeLLM]:
        fake.settings = settings  # type: ignore[attr-defined]
        yield fake

    for command in ("generate", "chat", "bench"):
        # The package holds the command under the same name as its module.
        monkeypatch.setattr(sys.modules[f"mini_infer.cli.{command}"], "open_llm", open_llm)
    return fake


# Settings and errors


def test_options_become_settings_with_the_command_lines_place(llm: FakeLLM) -> None:
    Path("mini-infer.toml").write_text('model = "file"\n[engine]\ndtype = "float16"\nblock_size = 8\n')
    result = run("generate", "x", "--model", "mine", "--plugins", "default, a", "--set", "engine.dtype=float32")
    assert result.exit_code == 0, result.output
    settings = llm.settings  # type: ignore[attr-defined]
    assert (settings.model, settings.plugins) == ("mine", ("default", "a"))
    assert (settings.engine.dtype, settings.engine.block_size) == ("float32", 8)
    assert settings.source_of("model") == "command line" and settings.source_of("engine.dtype") == "--set"


def test_wrong_settings_are_plain_lines_and_exit_code_2() -> None:
    Path("other.toml").write_text("[engine]\ndtyp = 1\n[server]\nport = 70000\n")
    result = run("serve", "--config", "other.toml", "--set", "model")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "--set model: write KEY=VALUE, such as --set engine.dtype=float32\n"
    result = run("serve", "--config", "other.toml")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines() == [
        "other.toml:2: unknown key 'engine.dtyp'; did you mean 'dtype'?",
        "other.toml:4: 'server.port' should be less than or equal to 65535, not 70000",
    ]


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("a"), 2), (RequestError("b"), 2), (EngineError("c"), 1)],
    ids=lambda value: str(value),
)
def test_exit_codes(error: Exception, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(sys.modules["mini_infer.cli.generate"], "open_llm", fail)
    result = run("generate", "x")
    assert (result.exit_code, result.stdout, result.stderr) == (code, "", f"{error}\n")


def test_a_real_process_ends_without_a_traceback() -> None:
    command = [sys.executable, "-c", "from mini_infer.cli import main; main()", "plugins", "--plugins", "nothing-such"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("command line: plugins: no plugin 'nothing-such' is installed; known: ")
    assert done.stderr.count("\n") == 1


# serve


SERVER = """
def serve(settings):
    print("serving", settings.model, settings.server.host, settings.server.port)
"""


def test_serve_hands_the_settings_to_the_installed_server(
    distributions: FakeDistributions, monkeypatch: pytest.MonkeyPatch
) -> None:
    distributions.install("acme-server", {"web": SERVER}, group="acme.server")
    monkeypatch.setattr(sys.modules["mini_infer.cli.serve"], "GROUP", "acme.server")
    info = distributions.folder / "acme_server-1.2.dist-info" / "entry_points.txt"
    info.write_text(info.read_text().replace("acme_server_web", "acme_server_web:serve"))
    result = run("serve", "--model", "m", "--host", "0.0.0.0", "--port", "0")
    assert (result.exit_code, result.stdout) == (0, "serving m 0.0.0.0 0\n")
    assert CliRunner().invoke(serve, ["--model", "n"]).stdout == "serving n 127.0.0.1 8000\n"


def test_serve_without_a_server_or_its_libraries(
    distributions: FakeDistributions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["mini_infer.cli.serve"], "GROUP", "acme.none")
    remedy = "install it with: pip install 'mini-infer[server]'"
    assert run("serve").stderr == f"no server is installed: {remedy}\n"
    distributions.install("acme-bare", {"web": "import litestar_is_missing"}, group="acme.bare")
    monkeypatch.setattr(sys.modules["mini_infer.cli.serve"], "GROUP", "acme.bare")
    result = run("serve")
    assert result.exit_code == 2
    assert result.stderr == f"the server needs litestar_is_missing, which is not installed: {remedy}\n"


# generate and chat


def test_generate_prints_each_answer(llm: FakeLLM) -> None:
    result = run("generate", "a", "b", "--max-tokens", "5", "--temperature", "0", "--seed", "3", "--stop", "x")
    assert result.stdout == "<a>\n<b>\n"
    assert llm.params == [SamplingParams(max_tokens=5, temperature=0, seed=3, stop=("x",))]
    assert run("generate", "--chat", "c").stdout == "<c>\n"
    assert llm.params[-1] == SamplingParams(max_tokens=None)
    assert run("generate", text="from a pipe").stdout == "<from a pipe>\n"


def test_generate_refuses_what_cannot_be_answered(llm: FakeLLM) -> None:
    assert run("generate", text="").stderr == "a prompt is empty: give some text\n"
    assert run("generate", "x", "--temperature", "-1").exit_code == 2
    for option in ("--batch-size", "--iterations", "--input-len", "--output-len"):
        assert "is not in the range x>=1" in run("bench", "latency", option, "0").stderr
    llm.error = "not a number in the logits"
    result = run("generate", "x")
    assert (result.exit_code, result.stderr) == (2, "not a number in the logits\n")


def test_chat_remembers_starts_over_and_ends(llm: FakeLLM) -> None:
    result = run("chat", "--system", "be brief", text="one\n\n/new\ntwo\nthree\n/quit\nfour\n")
    assert result.stdout == "you said one\nyou said two\nyou said three\n"
    system = {"role": "system", "content": "be brief"}
    assert llm.asked == [
        [system, {"role": "user", "content": "one"}],
        [system, {"role": "user", "content": "two"}],
        [
            system,
            {"role": "user", "content": "two"},
            {"role": "assistant", "content": "you said two"},
            {"role": "user", "content": "three"},
        ],
    ]


def test_chat_ends_with_the_input_and_with_an_error(llm: FakeLLM) -> None:
    assert run("chat", text="one").exit_code == 0
    llm.error = "the cache is full"
    result = run("chat", text="one\ntwo\n")
    assert (result.exit_code, result.stderr) == (2, "the cache is full\n")


# bench


@pytest.mark.parametrize("command", [["latency", "--batch-size", "2"], ["throughput", "--num-prompts", "3"]])
def test_bench_on_an_engine(llm: FakeLLM, command: list[str]) -> None:
    result = run("bench", *command, "--input-len", "4", "--output-len", "2", "--json")
    figures = json.loads(result.stdout)
    assert figures["output, tok/s"] > 0
    assert all(0 <= token < 7 for prompts in llm.asked for prompt in prompts for token in prompt)
    table = run("bench", *command, "--input-len", "4", "--output-len", "2").stdout
    assert all(name in table for name in figures)


# plugins and config


def test_plugins_are_listed_with_why(distributions: FakeDistributions) -> None:
    distributions.install("acme-tools", {"good": PLUGIN.format(name="good"), "bad": "1 / 0", "idle": "1 / 0"})
    result = run("plugins", "--plugins", "good,bad")
    table, sets = result.stdout.split("\n\n")
    rows = {line.split()[0]: line.split(None, 5) for line in table.splitlines()}
    assert "operator-fusion" in sets and "several operators in one kernel" in sets
    assert rows["good"] == ["good", "1.2", "acme-tools", "tier", "yes", "named in plugins (command line)"]
    assert rows["bad"][:5] == ["bad", "1.2", "acme-tools", "-", "no"] and "ZeroDivisionError" in rows["bad"][5]
    assert rows["idle"][5].strip() == "not named in plugins"


def test_the_schema_has_the_tables_of_what_is_installed(distributions: FakeDistributions) -> None:
    distributions.install("acme-tools", {"good": PLUGIN.format(name="good") + SETTINGS, "bad": "1 / 0"})
    result = run("config", "schema")
    schema = json.loads(result.stdout)
    assert schema["additionalProperties"] is False
    tables = schema["properties"]["plugin"]
    good = schema["$defs"][tables["properties"]["good"]["$ref"].rpartition("/")[2]]
    assert good["properties"]["size"]["default"] == 3 and tables["additionalProperties"] is False
    engine = schema["$defs"]["EngineSettings"]
    assert engine["properties"]["max_num_seqs"] | {"title": ""} == {
        "default": 256, "description": "requests in one step", "maximum": 65536, "minimum": 1, "title": "",
        "type": "integer",
    }  # fmt: skip
    assert "left out: plugin 'bad' (acme-tools 1.2) cannot be used: " in result.stderr


def test_choices_read_as_a_line() -> None:
    choice = Choice("engine.attention", "cpu", "first that fits", (("triton", "no GPU"), ("reference", "comes last")))
    assert str(choice) == "engine.attention = cpu (first that fits; not triton: no GPU; not reference: comes last)"


# bench serve


class FakeServer(BaseHTTPRequestHandler):
    """Streams as many tokens as are asked for; a prompt of one token is refused."""

    def do_GET(self) -> None:
        self._send("application/json", json.dumps({"data": [{"id": "tiny"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (body["model"], body["stream"], body["ignore_eos"]) == ("tiny", True, True)
        chunks: list[dict[str, Any]] = [{"choices": [{"text": "x"}]} for _ in range(body["max_tokens"])]
        chunks.append({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}})
        if len(body["prompt"]) == 1:
            chunks = [{"error": {"message": "too short"}}]
        self._send(
            "text/event-stream", "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        )

    def _send(self, kind: str, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_bench_of_a_server(url: str) -> None:
    result = run(
        "bench", "serve", "--url", url, "--num-prompts", "5", "--concurrency", "2", "--output-len", "3", "--json"
    )
    figures = json.loads(result.stdout)
    assert figures["requests"] == 5 and figures["output, tok/s"] > 0
    assert figures["TTFT, ms, median"] <= figures["TTFT, ms, longest"]


def test_bench_of_a_server_that_fails_or_is_not_there(url: str) -> None:
    result = run("bench", "serve", "--url", url, "--input-len", "1")
    assert (result.exit_code, result.stderr) == (1, "the server failed: too short\n")
    result = run("bench", "serve", "--url", "http://127.0.0.1:1")
    assert result.exit_code == 1 and result.stderr.startswith("http://127.0.0.1:1: ")


# Plugins that cannot be used


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (
            "1 / 0",
            "plugin 'bad' (acme-tools 1.2) cannot be used: its import failed: ZeroDivisionError: division by zero",
        ),
        (
            "name = 'bad'\napi_version = 9",
            "plugin 'bad' (acme-tools 1.2) cannot be used: it is written for api_version 9; this engine has 0",
        ),
        (
            PLUGIN.format(name="bad") + "conflicts = ('other',)",
            "plugin 'bad' (acme-tools 1.2) conflicts with plugin 'other' (acme-tools 1.2) over 'other': "
            "leave one of them out",
        ),
        (
            PLUGIN.format(name="bad") + "requires = ('wings',)",
            "plugin 'bad' (acme-tools 1.2) requires 'wings', which no enabled plugin is or provides",
        ),
    ],
)
@pytest.mark.parametrize("command", [["serve", "--dry-run"], ["generate", "x"], ["config", "explain"]])
def test_a_plugin_that_cannot_be_used_ends_every_command(
    distributions: FakeDistributions, command: list[str], source: str, told: str
) -> None:
    distributions.install("acme-tools", {"bad": source, "other": PLUGIN.format(name="other")})
    result = run(*command, "--plugins", "bad,other")
    assert (result.exit_code, result.stderr) == (2, told + "\n")


# On a real engine, of the toy model


@pytest.fixture
def toy(tmp_path: Path) -> list[str]:
    """Options that run the toy model, its plugin a plain file."""
    folder = tmp_path / "plugins"
    folder.mkdir()
    names = "name, api_version, model_adapters, weight_loaders"
    folder.joinpath("toy.py").write_text(f"from mini_infer.testing.toy_plugin import {names}\n")
    tmp_path.joinpath("toy.toml").write_text(
        f'model = "{tiny_model("toy")}"\nplugins = ["toy"]\nplugin_dirs = ["plugins"]\n[engine]\nnum_kv_blocks = 20\n'
    )
    return ["--config", str(tmp_path / "toy.toml")]


def test_dry_run_prints_the_composed_engine_and_loads_nothing(toy: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mini_infer.build.builder.load_checkpoint", None)
    result = run("serve", "--dry-run", *toy)
    assert result.exit_code == 0, result.stderr
    rows = [line.split(maxsplit=1) for line in result.stdout.splitlines() if line]
    parts = {row[0]: row[1] for row in rows if len(row) > 1}
    assert parts["scheduler"].split() == ["the", "reference", "core"]
    assert parts["plugin"].startswith("toy") and "20 blocks of 16" in parts["KV"]
    assert "engine.attention = reference: first that fits" in result.stdout


def test_explain_prints_values_sources_and_choices(toy: list[str]) -> None:
    result = run("config", "explain", *toy, "--set", "engine.max_num_seqs=3", "--set", "server.api_keys=very,secret")
    assert result.exit_code == 0, result.stderr
    rows = {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines() if line}
    assert rows["engine.max_num_seqs"] == ["3", "--set"]
    assert rows["engine.num_kv_blocks"] == ["20", f"{toy[1]}:5"]
    assert rows["server.api_keys"] == ["2", "keys", "--set"] and "secret" not in result.stdout
    assert "engine.dtype = float32: " in result.stdout
    assert "KV cache: " in result.stdout and "measured" not in result.stdout, "a CPU's step is not measured"


def test_answers_come_from_a_real_engine(toy: list[str]) -> None:
    first, second = (run("generate", "ab", "c", *toy, "--max-tokens", "4", "--temperature", "0") for _ in range(2))
    assert first.exit_code == 0, first.stderr
    assert first.stdout == second.stdout and first.stdout.count("\n") >= 2
    result = run("bench", "latency", *toy, "--input-len", "4", "--output-len", "3", "--iterations", "1", "--json")
    assert json.loads(result.stdout)["output, tok/s"] > 0
    result = run("generate", "a" * 5000, *toy)
    assert result.exit_code == 2 and "leaves no room for an answer" in result.stderr

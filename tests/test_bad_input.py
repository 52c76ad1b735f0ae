"""Each bad input of the command line, as a user meets it: one plain line that says what to do, and a non-zero exit.

The commands run as processes of their own, on tiny random checkpoints. What a request can have wrong is also asked of
one ``LLM``, which must go on.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.core.fake_plugins import FakeDistributions

from mini_infer.errors import RequestError
from mini_infer.sampling_params import SamplingParams
from mini_infer.testing.engines import make_llm, tiny_model
from mini_infer.testing.models import tiny_checkpoint

PATIENCE = 60
"""Seconds for what takes three on a machine that does nothing else."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of three shards without a tokenizer, to be spoilt."""
    return tiny_checkpoint(tmp_path / "model", num_shards=3)


def mini_infer(*arguments: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MINI_INFER_")}
    return subprocess.run(
        [sys.executable, "-m", "mini_infer", *map(str, arguments)],
        cwd=cwd,
        env={**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def fails(*arguments: str | Path, cwd: Path, **environment: str) -> str:
    """The one line that a command ends with."""
    done = mini_infer(*arguments, cwd=cwd, **environment)
    assert done.returncode == 2, done
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "Traceback" not in line
    return line


def generate(folder: Path, *arguments: str) -> str:
    return fails("generate", "x", "--plugins", "", "--model", folder, *arguments, cwd=folder.parent)


# The model


def test_a_model_folder_that_is_missing(tmp_path: Path) -> None:
    line = fails("serve", "--model", "./no/such/folder", "--port", "0", cwd=tmp_path)
    assert line.startswith("model folder ./no/such/folder does not exist; give the folder that holds config.json")


def test_an_architecture_that_nobody_serves(folder: Path) -> None:
    change_config(folder, architectures=["GPT9LMHeadModel"])
    line = generate(folder)
    assert re.match("architecture GPT9LMHeadModel is not supported; supported: LlamaForCausalLM, .*Qwen3", line)


def test_a_shard_that_was_cut(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1000])
    line = generate(folder)
    assert re.match(
        rf"{re.escape(str(shard))} cannot be read: it ends after \d+ of \d+ bytes, within the tensor "
        r"model\.layers\.\d\.[\w.]+; fetch it again$",
        line,
    )


def test_a_shard_that_is_missing(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[2]
    shard.unlink()
    line = generate(folder)
    assert re.match(
        rf"the weights file {re.escape(str(shard))} with the tensor model\.[\w.]+ is missing; fetch it again$", line
    )


def test_a_tensor_of_the_wrong_shape(folder: Path) -> None:
    change_config(folder, intermediate_size=100)
    line = generate(folder)
    assert re.match(
        r"the checkpoint's tensor model\.layers\.\d\.mlp\.\w+\.weight has shape \[.*\], but config\.json asks for \[",
        line,
    )


def test_a_folder_without_a_tokenizer(folder: Path) -> None:
    line = generate(folder)
    assert line.startswith(f"no usable tokenizer in {folder}: ") and "engine.skip_tokenizer = true" in line


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


# Memory and port


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        (
            "engine.num_kv_blocks=99999999",
            r"99999999 blocks need \S+ GiB, .* are free on cpu: lower engine\.num_kv_blocks",
        ),
        (
            "engine.kv_cache_memory=99TiB",
            r"blocks need \S+ GiB, \S+ GiB are free on cpu: lower engine\.kv_cache_memory",
        ),
    ],
)
def test_a_kv_cache_that_does_not_fit(setting: str, told: str, folder: Path) -> None:
    line = generate(folder, "--set", setting, "--set", "engine.skip_tokenizer=true")
    assert re.match(f"the KV cache does not fit: .*{told}$", line)


def test_a_port_in_use(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        line = fails("serve", "--model", folder, "--port", port, cwd=folder.parent)
    assert line == f"port {port} of 127.0.0.1 is in use: stop what listens there, or choose another with --port"


# Settings and plugins


def test_unknown_settings_are_one_line_each(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("[engine]\nmax_modle_len = 5\n")
    done = mini_infer(
        "serve", "--config", "mine.toml", "--set", "engine.dtyp=float32", cwd=tmp_path, MINI_INFER_SERVER__PROT="1"
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert sorted(done.stderr.splitlines()) == [
        "--set: unknown key 'engine.dtyp'; did you mean 'dtype'?",
        "env MINI_INFER_SERVER__PROT: unknown key 'server.prot'; did you mean 'port'?",
        "mine.toml:2: unknown key 'engine.max_modle_len'; did you mean 'max_model_len'?",
    ]


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (
            "cpu-atention",
            r"command line: plugins: no plugin 'cpu-atention' is installed; did you mean 'cpu-attention'\?",
        ),
        (
            "broken",
            r"plugin 'broken' \(acme 1\.2\) cannot be used: its import failed: ZeroDivisionError: division by zero",
        ),
        ("old", r"plugin 'old' \(acme 1\.2\) cannot be used: it is written for api_version 9; this engine has \d"),
        (
            "one,two",
            r"plugin 'one' \(acme 1\.2\) conflicts with plugin 'two' \(acme 1\.2\) over 'two': leave one of them",
        ),
        ("lonely", r"plugin 'lonely' \(acme 1\.2\) requires 'wings', which no enabled plugin is or provides"),
    ],
)
def test_plugins_that_cannot_be_used(names: str, told: str, tmp_path: Path) -> None:
    plugin = "name = '{}'\napi_version = {}\n{}\n"
    FakeDistributions(tmp_path).install(
        "acme",
        {
            "broken": "1 / 0",
            "old": plugin.format("old", 9, ""),
            "one": plugin.format("one", 0, "conflicts = ('two',)"),
            "two": plugin.format("two", 0, ""),
            "lonely": plugin.format("lonely", 0, "requires = ('wings',)"),
        },
    )
    line = fails("generate", "x", "--plugins", names, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert re.match(told, line), line


# Requests


def test_prompts_on_the_command_line() -> None:
    model = tiny_model("llama", max_position_embeddings=64)
    too_long = fails("generate", "x" * 1000, "--model", model, cwd=model.parent)
    assert re.match(r"prompt has .*\d+ tokens and leaves no room for an answer: max_model_len is 64 tokens", too_long)
    assert fails("generate", "", "--model", model, cwd=model.parent) == "a prompt is empty: give some text"


BAD_REQUESTS: dict[str, tuple[Any, Callable[[], SamplingParams], str]] = {
    "empty text": ("", SamplingParams, "^prompt is empty: give at least one token$"),
    "no ids": ({"prompt_token_ids": []}, SamplingParams, "^prompt is empty: give at least one token$"),
    "too long": ([1] * 64, SamplingParams, "^prompt has 64 tokens and leaves no room .* max_model_len is 64 tokens"),
    "id past the logits": (
        [1, 384],
        SamplingParams,
        r"^prompt holds 384, which is no token of this model \(0 to 319\)$",
    ),
    "id of no token": ([1, 350], SamplingParams, "^prompt holds 350, which is no token of this model"),
    "negative id": ([-1], SamplingParams, "^prompt holds -1, which is no token of this model"),
    "huge id": ([10**30], SamplingParams, "^prompt holds 1000000000000000000000000000000, which is no token"),
    "id in a bias": ("a", lambda: SamplingParams(logit_bias={384: 1.0}), "^logit_bias holds 384, which is no token"),
    "id of a stop": ("a", lambda: SamplingParams(stop_token_ids=[320]), "^stop_token_ids holds 320, which is no token"),
    "surrogate": ("\ud800", SamplingParams, "^prompt must be Unicode text without lone surrogates$"),
}


def test_bad_requests_leave_the_engine_as_it_was() -> None:
    with make_llm(tiny_model("llama", max_position_embeddings=64), num_kv_blocks=8) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=4)
        before = llm.generate([[5, 6]], greedy)[0].outputs[0].token_ids
        for name, (prompt, params, told) in BAD_REQUESTS.items():
            with pytest.raises(RequestError, match=told) as error:
                llm.generate([[7], prompt], params())
            assert len(str(error.value).splitlines()) == 1, name
        assert llm.generate([[5, 6]], greedy)[0].outputs[0].token_ids == before


# What is odd, but no mistake


def test_no_compiler_no_home_and_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    """The plain path is taken, and the start log as well as ``config explain`` says so."""
    model = shutil.copytree(tiny_model("llama"), tmp_path / "модель")
    (tmp_path / "file").write_text("no folder can be made in here")
    odd = {"PATH": "/nowhere", "CXX": "", "HOME": "", "XDG_CACHE_HOME": str(tmp_path / "file")}
    options = ("--model", model, "--plugins", "cpu-attention,cpu-kernels")
    started = mini_infer("generate", "hi", "--verbose", "--max-tokens", "2", *options, cwd=tmp_path, **odd)
    assert started.returncode == 0 and "Traceback" not in started.stderr, started
    explained = mini_infer("config", "explain", *options, cwd=tmp_path, **odd)
    assert explained.returncode == 0, explained
    for text in (started.stderr, explained.stdout):
        assert "no native kernels, plain PyTorch instead: " in text

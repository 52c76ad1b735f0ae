"""The example of a third party, installed as its users would install it: found, enabled by name, right, and plainly
refused where it or its settings are wrong.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from random import Random
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.fake_plugins import FakeDistributions

from mini_infer import LLM, AsyncLLM, SamplingParams
from mini_infer.build import build_engine
from mini_infer.cli import main
from mini_infer.messages import EngineRequest
from mini_infer.serving.engine_thread import ThreadClient
from mini_infer.settings import load_settings
from mini_infer.testing import assert_same_tokens, make_engine, tiny_model
from mini_infer.testing.reference import Equality, Reference
from mini_infer.testing.reference_sampler import Draw
from mini_infer.testing.traffic import check_traffic, random_traffic
from mini_infer_server.app import create_app

DISTRIBUTION = "mini-infer-example"
BOTH = ("shortest-prompt-first", "ban-tokens")
VOCAB_SIZE = 96
NUM_TRAFFICS = 200 if os.environ.get("MINI_INFER_TEST_FULL") == "1" else 20

SCHEDULER = """
from mini_infer.plugins import hookimpl

name = "{name}"
api_version = 0

@hookimpl
def scheduler(context):
    from mini_infer.reference.scheduler import first_come_first_served

    return first_come_first_served()
"""


@pytest.fixture(autouse=True)
def installed() -> None:
    try:
        distribution(DISTRIBUTION)
    except PackageNotFoundError:
        pytest.fail(f"{DISTRIBUTION} is not installed: run make setup, which installs tests/third_party")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a user starts the engine."""
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith("MINI_INFER_"):
            monkeypatch.delenv(name)
    return tmp_path


@pytest.fixture
def distributions(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDistributions]:
    site = folder / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    before = set(sys.modules)
    yield FakeDistributions(site)
    for name in set(sys.modules) - before:
        if str(site) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


def write(*plugins: str, more: str = "", engine: str = "") -> None:
    """A settings file as a user has it."""
    lines = [f'model = "{model()}"', f"plugins = {list(plugins)}", more, "[engine]", "num_kv_blocks = 64", engine]
    Path("mini-infer.toml").write_text("\n".join(lines) + "\n")


def command(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@cache
def model() -> Path:
    return tiny_model("llama", vocab_size=VOCAB_SIZE, eos_token_id=VOCAB_SIZE - 1)


def greedy(banned: Sequence[int] = (), **more: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0, "max_tokens": 8, "ignore_eos": True, "extensions": {"ban-tokens": list(banned)}, **more}
    )


# -- it works ---------------------------------------------------------------------------------------------------------


def test_enabled_by_name_in_a_settings_file_it_does_what_it_says() -> None:
    prompts = [[7] * 20, [8] * 3, [9, 10]]
    write("default", engine="skip_tokenizer = true")
    with LLM() as llm:
        plain = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    write("default", *BOTH, engine="skip_tokenizer = true")
    with LLM() as llm:
        banned = sorted(set(plain[1].outputs[0].token_ids))
        answers = llm.generate(prompts, [greedy(), greedy(banned), greedy()])
    assert_same_tokens([answers[0], answers[2]], [plain[0], plain[2]])
    assert not set(banned) & set(answers[1].outputs[0].token_ids)


def test_short_prompts_go_first() -> None:
    lengths = {"long": 30, "short": 3, "middle": 12, "short too": 3}
    for plugins, order in (
        (("default",), list(lengths)),
        (("default", *BOTH), ["short", "short too", "middle", "long"]),
    ):
        # A pause of this machine must not age a request past another.
        table = "[plugin.shortest-prompt-first]\nageing = 1e-6\n" if plugins[1:] else ""
        write(*plugins, engine=f"skip_tokenizer = true\nmax_num_seqs = 1\n{table}")
        engine = build_engine(load_settings()).engine
        for name, length in lengths.items():
            params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
            engine.add_request(EngineRequest(request_id=name, prompt_token_ids=[5] * length, params=params))
        answered: dict[str, None] = {}
        while engine.has_work():
            answered |= dict.fromkeys(delta.request_id for delta in engine.step())
        engine.shutdown()
        assert list(answered) == order


class BanningReference(Reference):
    """As the reference, without what a request bans."""

    def _draw(self, request: EngineRequest, row: Any, output: Sequence[int]) -> Draw:
        row = np.array(row)
        row[request.params.extensions.get("ban-tokens", [])] = -np.inf
        return super()._draw(request, row, output)


@settings(max_examples=NUM_TRAFFICS)
@given(rng=st.randoms(use_true_random=False), overlap=st.booleans())
def test_each_request_gets_its_own_tokens_under_random_traffic(rng: Random, overlap: bool) -> None:
    traffic = random_traffic(rng, VOCAB_SIZE)
    for index, request in enumerate(traffic.requests):
        if rng.randint(0, 1):
            extensions = {"ban-tokens": [token for token in range(VOCAB_SIZE) if rng.randint(0, 1)]}
            params = msgspec.structs.replace(request.params, extensions=extensions)
            traffic.requests[index] = msgspec.structs.replace(request, params=params)
    engine = make_engine(model(), plugins=BOTH, overlap=overlap, **traffic.engine).engine
    check_traffic(engine, traffic, Equality(reference()))
    engine.shutdown()


@cache
def reference() -> Reference:
    return BanningReference(model())


async def test_over_http_the_processors_name_is_a_field() -> None:
    write("default", *BOTH)
    client = ThreadClient(lambda: build_engine(load_settings()))
    async with AsyncLLM(client=client) as llm:
        transport = httpx.ASGITransport(create_app(llm))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
            body = {"prompt": [1, 2, 3], "temperature": 0, "max_tokens": 4, "ban-tokens": list(range(1, VOCAB_SIZE))}
            answer = await http.post("/v1/completions", json=body)
            refused = await http.post("/v1/completions", json={**body, "ban-tokens": "the"})
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4, answer.text
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["message"] == "ban-tokens must be a list of token ids, integers >= 0"
    assert error["param"] == "ban-tokens"


# -- it is shown ------------------------------------------------------------------------------------------------------


def rows_of_plugins() -> dict[str, list[str]]:
    """``mini-infer plugins``: the words of each row, by plugin."""
    result = command("plugins")
    assert result.exit_code == 0, result.output
    return {line.split()[0]: line.split() for line in result.stdout.split("\n\n")[0].splitlines()}


def test_the_list_of_plugins_shows_name_version_and_source() -> None:
    version = distribution(DISTRIBUTION).version
    write("default", "ban-tokens")
    rows = rows_of_plugins()
    assert rows["ban-tokens"][:5] == ["ban-tokens", version, DISTRIBUTION, "-", "yes"]
    assert rows["shortest-prompt-first"][:5] == ["shortest-prompt-first", version, DISTRIBUTION, "-", "no"]
    assert " ".join(rows["shortest-prompt-first"][5:]) == "not named in plugins"


def test_explain_and_dry_run_name_it() -> None:
    write(*BOTH, engine="[plugin.shortest-prompt-first]\nageing = 7")
    explained, built = command("config", "explain"), command("serve", "--dry-run")
    assert explained.exit_code == built.exit_code == 0, explained.output + built.output
    (setting,) = (line for line in explained.stdout.splitlines() if "plugin.shortest-prompt-first.ageing" in line)
    assert "7" in setting and "mini-infer.toml:7" in setting
    for output in (explained.stdout, built.stdout):
        assert "shortest-prompt-first" in output


def test_the_schema_knows_its_settings() -> None:
    result = command("config", "schema")
    assert result.exit_code == 0
    assert "prompt tokens that a second of waiting counts for" in result.stdout


def test_importing_its_plugins_imports_nothing_heavy() -> None:
    modules = [point.module for point in distribution(DISTRIBUTION).entry_points]
    script = (
        f"import sys, importlib\nfor name in {modules}: importlib.import_module(name)\nprint('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# -- it is refused ----------------------------------------------------------------------------------------------------


def refused(*plugins: str, more: str = "") -> list[str]:
    """The lines in which the start is refused: on stderr, with exit code 2 and nothing else."""
    Path("mini-infer.toml").write_text(f'model = "{model()}"\nplugins = {list(plugins)}\n{more}')
    result = command("generate", "hello")
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert "Traceback" not in result.stderr
    return result.stderr.splitlines()


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("name = 'broken'\napi_version = 7", "it is written for api_version 7; this engine has 0"),
        ("name = 'broken'", "it is written for api_version None; this engine has 0"),
        ("import not_there", "its import failed: ModuleNotFoundError: No module named 'not_there'"),
        ("def f(:", "its import failed: SyntaxError: invalid syntax (acme_tools_broken.py, line 1)"),
        ("name = 'other'\napi_version = 0", "it calls itself 'other'; 'name' must be 'broken'"),
        ("name = 'broken'\napi_version = 0\nextra = 'speed'", "it needs not-there>=2: pip install 'acme-tools[speed]'"),
    ],
)
def test_a_broken_one_by_distribution_version_and_reason(
    distributions: FakeDistributions, source: str, reason: str
) -> None:
    extras = "Provides-Extra: speed\nRequires-Dist: not-there>=2 ; extra == 'speed'\n"
    distributions.install("acme-tools", {"broken": source}, metadata=extras)
    assert refused("default", "broken") == [f"plugin 'broken' (acme-tools 1.2) cannot be used: {reason}"]
    assert rows_of_plugins()["broken"][:5] == ["broken", "1.2", "acme-tools", "-", "no"]


def test_a_hook_that_fails(distributions: FakeDistributions) -> None:
    source = SCHEDULER.format(name="broken").replace("return first_come_first_served()", "return 1 / 0")
    distributions.install("acme-tools", {"broken": source})
    assert refused("default", "broken") == [
        "plugin 'broken' (acme-tools 1.2) cannot be used: its hook 'scheduler' failed: ZeroDivisionError: division by "
        "zero"
    ]


def test_an_unknown_one_with_the_nearest() -> None:
    assert refused("default", "ban-token") == [
        "mini-infer.toml:2: plugins: no plugin 'ban-token' is installed; did you mean 'ban-tokens'?"
    ]


def test_a_conflict(distributions: FakeDistributions) -> None:
    source = "name = '{name}'\napi_version = 0\n{kind} = ('{word}',)"
    distributions.install(
        "acme-tools",
        {
            "jealous": source.format(name="jealous", kind="conflicts", word="ban-tokens"),
            "needy": source.format(name="needy", kind="requires", word="host-tier"),
        },
    )
    version = distribution(DISTRIBUTION).version
    assert refused("ban-tokens", "jealous") == [
        f"plugin 'jealous' (acme-tools 1.2) conflicts with plugin 'ban-tokens' ({DISTRIBUTION} {version}) over "
        "'ban-tokens': leave one of them out"
    ]
    assert refused("needy") == [
        "plugin 'needy' (acme-tools 1.2) requires 'host-tier', which no enabled plugin is or provides"
    ]


def test_a_second_scheduler_with_both_names(distributions: FakeDistributions) -> None:
    distributions.install("acme-order", {"fair": SCHEDULER.format(name="fair")})
    version = distribution(DISTRIBUTION).version
    assert refused("fair", *BOTH) == [
        f"plugin 'fair' (acme-order 1.2) and plugin 'shortest-prompt-first' ({DISTRIBUTION} {version}) each bring a "
        "scheduler, and there is exactly one: leave one of them out"
    ]


def test_two_of_one_name(distributions: FakeDistributions) -> None:
    distributions.install("acme-order", {"ban-tokens": "name = 'ban-tokens'\napi_version = 0"})
    (line,) = refused("ban-tokens")
    assert line.startswith("plugin 'ban-tokens' comes from several places (") and "acme-order 1.2" in line
    assert DISTRIBUTION in line and line.endswith("remove all but one")


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (
            "agening = 3",
            "mini-infer.toml:4: unknown key 'plugin.shortest-prompt-first.agening'; did you mean 'ageing'?",
        ),
        ("ageing = 0", "mini-infer.toml:4: 'plugin.shortest-prompt-first.ageing' should be greater than 0, not 0"),
        (
            "ageing = 'fast'",
            "mini-infer.toml:4: 'plugin.shortest-prompt-first.ageing' should be a valid number, not 'fast'",
        ),
        (
            "[plugin.ban-token]",
            "mini-infer.toml:4: unknown key 'plugin.ban-token'; did you mean 'ban-tokens'?",
        ),
        (
            "[plugin.ban-tokens]\nx = 1",
            "mini-infer.toml:4: plugin 'ban-tokens' (mini-infer-example {}) has no settings",
        ),
    ],
)
def test_a_wrong_setting_by_file_line_and_key(table: str, said: str) -> None:
    told = refused(*BOTH, more=f"[plugin.shortest-prompt-first]\n{table}\n")
    assert told == [said.format(distribution(DISTRIBUTION).version)]


def test_a_wrong_setting_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINI_INFER_PLUGIN__SHORTEST_PROMPT_FIRST__AGEING", "-1")
    assert refused(*BOTH) == [
        "env MINI_INFER_PLUGIN__SHORTEST_PROMPT_FIRST__AGEING: 'plugin.shortest-prompt-first.ageing' should be greater "
        "than 0, not -1"
    ]

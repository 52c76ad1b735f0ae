"""Settings: precedence, sources, text from outside, and errors that say where and what instead."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from mini_infer.errors import ConfigError
from mini_infer.settings import EngineSettings, ServerSettings, Settings, load_settings, parse_share, parse_size
from mini_infer.settings.toml_lines import key_lines


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(text: str, name: str = "mini-infer.toml") -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def errors(**sources: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_settings(**{"environ": {}, **sources})  # type: ignore[arg-type]
    return str(caught.value).splitlines()


def test_defaults_serve_the_demo_on_this_machine_only() -> None:
    settings = load_settings(environ={})
    assert (settings.model, settings.plugins, settings.without, settings.plugin_dirs) == ("demo", ("default",), (), ())
    assert (settings.server.host, settings.server.port, settings.server.api_keys) == ("127.0.0.1", 8000, ())
    engine = settings.engine
    assert {engine.device, engine.dtype, engine.load_format, engine.attention, engine.overlap} == {"auto"}
    assert (engine.max_num_seqs, engine.max_num_batched_tokens, engine.block_size) == (256, 8192, None)
    assert set(settings.sources.values()) == {"default"}


def test_each_source_outranks_the_one_below() -> None:
    write('[engine]\nmax_num_seqs = 1\nmax_num_batched_tokens = 1\ndtype = "float16"\nblock_size = 1\n')
    settings = load_settings(
        environ={
            "MINI_INFER_ENGINE__DTYPE": "float32",
            "MINI_INFER_ENGINE__BLOCK_SIZE": "2",
            "MINI_INFER_ENGINE__MAX_NUM_BATCHED_TOKENS": "2",
        },
        arguments={"engine": {"max_num_batched_tokens": 3, "block_size": 3}},
        overrides={"engine.block_size": "4"},
    )
    engine = settings.engine
    assert (engine.max_num_seqs, engine.dtype, engine.max_num_batched_tokens, engine.block_size) == (1, "float32", 3, 4)
    assert {key: source for key, source in settings.sources.items() if source != "default"} == {
        "engine.max_num_seqs": "mini-infer.toml:2",
        "engine.dtype": "env MINI_INFER_ENGINE__DTYPE",
        "engine.max_num_batched_tokens": "argument",
        "engine.block_size": "--set",
    }


def test_config_names_another_file_and_what_arguments_are_called() -> None:
    write("[server]\nport = 1\n")
    path = write("[server]\nport = 2\n", "conf/other.toml")
    settings = load_settings(config=path, arguments={"model": "x"}, environ={}, argument_source="command line")
    assert (settings.server.port, settings.source_of("server.port")) == (2, "conf/other.toml:2")
    assert settings.source_of("model") == "command line"


def test_settings_are_frozen_all_the_way_down() -> None:
    settings = load_settings(environ={})
    with pytest.raises(ValidationError):
        settings.model = "other"  # type: ignore[misc]
    with pytest.raises(ValidationError):
        settings.engine.dtype = "float32"  # type: ignore[misc]


def test_the_class_itself_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    write("[server]\nport = 1\n")
    monkeypatch.setenv("MINI_INFER_SERVER__PORT", "2")
    assert Settings().server.port == 8000
    assert load_settings().server.port == 2


def test_plugin_tables_keep_dashes_from_every_source() -> None:
    write('[plugin.prefix-cache]\neviction = "lru"\nblocks = 5\n')
    settings = load_settings(
        environ={"MINI_INFER_PLUGIN__PREFIX_CACHE__EVICTION": "lfu"},
        overrides={"plugin.prefix-cache.weights.age": "2"},
    )
    assert settings.plugin == {"prefix-cache": {"eviction": "lfu", "blocks": 5, "weights": {"age": "2"}}}
    assert settings.source_of("plugin.prefix-cache.eviction") == "env MINI_INFER_PLUGIN__PREFIX_CACHE__EVICTION"
    assert settings.source_of("plugin.prefix-cache.blocks") == "mini-infer.toml:3"


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("engine.block_size", "32", 32),
        ("engine.block_size", "null", None),
        ("engine.max_model_len", "auto", "auto"),
        ("engine.max_model_len", "2048", 2048),
        ("engine.overlap", "true", True),
        ("engine.overlap", "auto", "auto"),
        ("engine.offline", "1", True),
        ("engine.offline", "no", False),
        ("engine.revision", "123", "123"),
        ("engine.kv_cache_memory", "12GiB", "12GiB"),
        ("engine.kv_cache_memory", "0.8", "0.8"),
        ("server.api_keys", "a, b", ("a", "b")),
        ("server.api_keys", '["a,b"]', ("a,b",)),
        ("plugins", "default,ngram", ("default", "ngram")),
        ("plugins", "default", ("default",)),
        ("model", "42", "42"),
    ],
)
@pytest.mark.parametrize("source", ["--set", "environment"])
def test_text_is_read_as_its_field_wants(key: str, text: str, value: object, source: str) -> None:
    if source == "--set":
        settings = load_settings(overrides={key: text}, environ={})
    else:
        settings = load_settings(environ={f"MINI_INFER_{key.replace('.', '__').upper()}": text})
    table, _, name = key.rpartition(".")
    found = getattr(getattr(settings, table) if table else settings, name)
    assert found == value and type(found) is type(value)


def test_values_in_python_and_in_the_file_keep_their_types() -> None:
    write('[engine]\nmax_num_seqs = "8"\nnum_threads = true\n')
    assert errors() == [
        "mini-infer.toml:2: 'engine.max_num_seqs' should be a valid integer, not '8'",
        "mini-infer.toml:3: 'engine.num_threads' should be a valid integer, not True",
    ]
    Path("mini-infer.toml").unlink()
    assert errors(arguments={"engine": {"offline": 1}}) == [
        "argument: 'engine.offline' should be a valid boolean, not 1"
    ]


def test_every_error_is_told_at_once_with_its_place_and_the_nearest_key() -> None:
    write(
        """\
model = "demo"
port = 9000
[engine]
dtyp = "auto"
max_model_len = "long"
kv_cache_memory = "12 potatoes"
plugins = [
  "default",
]
[server.tls]
cert = "x"
"""
    )
    told = errors(
        environ={"MINI_INFER_ENGIN__DTYPE": "auto", "MINI_INFER_ENGINE__BLOCK_SIZE": "0", "MINI_INFER_MODEL_": "x"},
        overrides={"server.prt": "1"},
        arguments={"engine": {"max_modle_len": 5}},
    )
    assert sorted(told) == sorted(
        [
            "mini-infer.toml:2: unknown key 'port'; did you mean 'server.port'?",
            "mini-infer.toml:4: unknown key 'engine.dtyp'; did you mean 'dtype'?",
            "mini-infer.toml:5: 'engine.max_model_len' should be a valid integer or 'auto', not 'long'",
            "mini-infer.toml:6: 'engine.kv_cache_memory' should be 'auto', a size such as '12GiB' or a share such as "
            "0.5, not '12 potatoes'",
            "mini-infer.toml:7: unknown key 'engine.plugins'; did you mean 'plugins'?",
            "mini-infer.toml:10: unknown key 'server.tls'; known: api_keys, host, max_body_bytes, port, "
            "served_model_name",
            "env MINI_INFER_ENGIN__DTYPE: unknown key 'engin'; did you mean 'engine'?",
            "env MINI_INFER_ENGINE__BLOCK_SIZE: 'engine.block_size' should be greater than or equal to 1, not 0",
            "env MINI_INFER_MODEL_: unknown key 'model_'; did you mean 'model'?",
            "--set: unknown key 'server.prt'; did you mean 'port'?",
            "argument: unknown key 'engine.max_modle_len'; did you mean 'max_model_len'?",
        ]
    )


def test_a_value_where_a_table_belongs() -> None:
    write('engine = "fast"\n[plugin]\nngram = 3\n')
    assert errors(environ={"MINI_INFER_SERVER": "x", "MINI_INFER_PLUGIN__A": "1"}) == [
        "env MINI_INFER_SERVER: 'server' should be a table, not 'x'",
        "env MINI_INFER_PLUGIN__A: 'plugin.a' should be a table, not '1'",
        "mini-infer.toml:1: 'engine' should be a table, not 'fast'",
        "mini-infer.toml:3: 'plugin.ngram' should be a table, not 3",
    ]
    assert errors(config=write("", "empty.toml"), overrides={"plugin.a.b": "1", "plugin.a.b.c": "1"}) == [
        "--set: 'plugin.a.b.c' is set both as a value and as a table"
    ]


def test_text_that_is_no_table_stays_what_was_written() -> None:
    assert errors(overrides={"engine": '{dtype="float32"}'}) == [
        """--set: 'engine' should be a table, not '{dtype="float32"}'"""
    ]


@pytest.mark.parametrize("key", ["", ".engine", "engine.", "engine..dtype", "plugin..x"])
def test_keys_with_nothing_between_their_dots(key: str) -> None:
    assert errors(overrides={key: "1"}) == [f"--set: '{key}' is no key: write it as engine.dtype is"]
    if key == ".engine":
        assert errors(environ={"MINI_INFER___ENGINE": "1"}) == [
            "env MINI_INFER___ENGINE: '.engine' is no key: write it as engine.dtype is"
        ]


def test_values_beyond_any_machine() -> None:
    deep, nines = "[" * 5000, "9" * 400
    assert errors(overrides={"server.port": deep}) == [
        f"--set: 'server.port' should be a valid integer, not '{deep[:199]}"
    ]
    assert "a size below" in errors(overrides={"engine.kv_cache_memory": nines})[0]
    limits = {"num_threads": 1024, "max_num_seqs": 2**16, "max_num_batched_tokens": 2**22}
    for name, most in limits.items():
        assert errors(overrides={f"engine.{name}": "99999999999"}) == [
            f"--set: 'engine.{name}' should be less than or equal to {most}, not 99999999999"
        ]
    assert errors(overrides={"engine.max_num_seqs": "true"})[0].endswith("should be a valid integer, not 'true'")
    assert errors(config=write('plugins = "x"\n', "text.toml")) == ["text.toml:1: 'plugins' should be a list, not 'x'"]
    assert "should match ^(auto|cpu" in errors(overrides={"engine.device": "tpu"})[0]


def test_a_file_that_cannot_be_read() -> None:
    assert errors(config=write(f"a = {'[' * 5000}", "deep.toml")) == ["deep.toml: nested too deeply"]
    write("\ufeffmodel = 'x'\n", "marked.toml")
    assert load_settings(config=Path("marked.toml"), environ={}).model == "x"
    assert errors(config=Path("none.toml")) == ["none.toml: cannot read the settings file: No such file or directory"]
    assert errors(config=write("a = 1\nb = = 2\n", "bad.toml")) == ["bad.toml:2: not valid TOML: Invalid value"]
    Path("latin.toml").write_bytes(b'model = "\xff"')
    assert errors(config=Path("latin.toml")) == ["latin.toml: not UTF-8 text"]


def test_plugin_folders_are_relative_to_the_file_that_names_them() -> None:
    path = write('plugin_dirs = ["mine"]\n', "conf/x.toml")
    assert load_settings(config=path, environ={}).plugin_dirs == ("conf/mine",)
    assert load_settings(arguments={"plugin_dirs": ["mine"]}, environ={}).plugin_dirs == ("mine",)


def test_another_process_gets_values_and_sources() -> None:
    write('[plugin.x]\na = 1\n[server]\napi_keys = ["k"]\n')
    settings = load_settings(environ={"MINI_INFER_ENGINE__DTYPE": "float32"})
    copy = Settings.from_json(settings.to_json())
    assert copy == settings and copy.sources == settings.sources


def test_keys_are_not_printed() -> None:
    assert "secret" not in repr(load_settings(arguments={"server": {"api_keys": ["secret"]}}, environ={}))


def test_sizes() -> None:
    sizes = {"12GiB": 12 * 2**30, "1.5 gib": 3 * 2**29, "500MB": 500 * 10**6, "7": 7, "3B": 3}
    assert {text: parse_size(text) for text in sizes} == sizes
    for text in ("", "GiB", "-1GiB", "1 2", "1PB"):
        with pytest.raises(ValueError, match="such as"):
            parse_size(text)


def test_a_share_of_memory_is_a_number_with_a_point() -> None:
    assert (parse_share("0.25"), parse_share("1.0"), parse_share("1"), parse_share("0.5GiB")) == (0.25, 1.0, None, None)
    for share, kept in ((0.8, "0.8"), (1.0, "1.0"), (0.125, "0.125")):
        assert EngineSettings(kv_cache_memory=share).kv_cache_memory == kept  # type: ignore[arg-type]
    write("[engine]\nkv_cache_memory = 0.5\n")
    assert load_settings(environ={}).engine.kv_cache_memory == "0.5"
    for wrong in ("0.0", "1.5"):
        told = errors(overrides={"engine.kv_cache_memory": wrong})
        assert told == [
            "--set: 'engine.kv_cache_memory' should be a share above 0 and at most 1, or a size with its unit such as "
            f"'1.5GiB', not {wrong}"
        ]


def test_every_setting_says_what_it_is() -> None:
    for model in (Settings, EngineSettings, ServerSettings):
        for name, field in model.model_fields.items():
            assert field.description or name in ("engine", "server"), name
    assert json.dumps(Settings.model_json_schema())


def test_line_numbers_of_awkward_documents() -> None:
    text = '''# a comment
title = """
[not.a.table]
x = 1
"""   # two lines of text
"quoted.key" = 1
a.b.c = 1   # dotted
list = [  # [x]
  1, # 2
]

[table."with.dot"]  # comment
inline = { x = 1, y = { z = 2 } }
[[many]]
k = 1
[[many]]
k = 2
'''
    lines = {".".join(key): line for key, line in key_lines(text).items()}
    assert lines == {
        "title": 2, "quoted.key": 6, "a": 7, "a.b": 7, "a.b.c": 7, "list": 8, "table.with.dot": 12,
        "table.with.dot.inline": 13, "table.with.dot.inline.x": 13, "table.with.dot.inline.y": 13,
        "table.with.dot.inline.y.z": 13, "many": 14, "many.k": 15,
    }  # fmt: skip


@given(st.dictionaries(st.sampled_from("abcdef"), st.integers() | st.text("ab[]=#\n\"'"), min_size=1))
def test_a_key_is_on_the_line_where_it_is_written(values: dict[str, int | str]) -> None:
    lines, expected = [], {}
    for key, value in values.items():
        expected[(key,)] = sum(line.count("\n") + 1 for line in lines) + 1
        lines.append(f"{key} = {json.dumps(value)}")
    assert key_lines("\n".join(lines)) == expected


def test_the_page_of_settings_names_each_with_its_default_and_meaning() -> None:
    page = (Path(__file__).parents[2] / "docs" / "settings.md").read_text()
    for model in (Settings, EngineSettings, ServerSettings):
        for name, field in model.model_fields.items():
            if name in ("engine", "server", "plugin"):
                continue
            default = json.dumps(list(field.default) if isinstance(field.default, tuple) else field.default)
            row = f"| `{name}` | `{'unset' if default == 'null' else default}` | {field.description} |"
            assert row in page, f"docs/settings.md lacks: {row}"

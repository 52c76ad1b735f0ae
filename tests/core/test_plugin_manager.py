"""The plugin manager: what it loads, in which order it asks, and every way in which a plugin can be wrong."""

import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel
from tests.core.fake_plugins import FakeDistributions, plugin, stub

from mini_infer.errors import ConfigError, PluginConflictError, PluginError, PluginLoadError, PluginNotFoundError
from mini_infer.interfaces import AttentionBackend, CachePolicy, ModelAdapter, Observer, Scheduler, WeightLoader
from mini_infer.plugin_system.manager import PluginManager
from mini_infer.plugin_system.rows import describe_plugins
from mini_infer.plugin_system.sets import PLUGIN_SETS, PluginSet
from mini_infer.plugins import hookimpl
from mini_infer.settings import Settings, load_settings

GOOD = "name = '{name}'\napi_version = 0\n"
ADAPTER = """
from mini_infer.plugins import hookimpl
from mini_infer.interfaces import {interface} as Interface

name = '{name}'
api_version = 0

@hookimpl
def {hook}(context):
    answer = type('Answer', (Interface,), {{'name': name, **dict.fromkeys(Interface.__abstractmethods__)}})
    return [answer()]
"""


def settings(*plugins: str, **more: Any) -> Settings:
    return load_settings(arguments={"plugins": list(plugins), **more}, environ={})


def manager(*plugins: str, modules: Any = (), **more: Any) -> PluginManager:
    return PluginManager(settings(*plugins, **more), device="cpu", modules=modules)


def asked(found: PluginManager, log: list[str] | None = None) -> Any:
    return found.context(dtype="float32", log=[].append if log is None else log.append)


def answering(name: str, hook: str, answer: Any, **attributes: Any) -> Any:
    """A plugin whose one hook gives that answer, or raises it."""

    def implementation(context: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    return plugin(name, implementation=hookimpl(specname=hook)(implementation), **attributes)


# Loading


def test_only_enabled_plugins_are_imported(distributions: FakeDistributions) -> None:
    distributions.install("acme-tools", {"one": GOOD.format(name="one"), "two": "raise SystemExit('imported')"})
    found = manager("one")
    assert [loaded.name for loaded in found.plugins] == ["one"]
    assert "acme_tools_one" in sys.modules and "acme_tools_two" not in sys.modules


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import not_there", "its import failed: ModuleNotFoundError: No module named 'not_there'"),
        ("1 / 0", "its import failed: ZeroDivisionError: division by zero"),
        ("name = 'other'", "it calls itself 'other'; 'name' must be 'broken'"),
        ("name = 'broken'", "it is written for api_version None; this engine has 0"),
        ("name = 'broken'\napi_version = 7", "it is written for api_version 7; this engine has 0"),
        (
            GOOD.format(name="broken") + "requires = 'paged-kv'",
            "its 'requires' must be a tuple of names, not 'paged-kv'",
        ),
        (GOOD.format(name="broken") + "Settings = dict", "its 'Settings' must be a pydantic model with extra='forbid'"),
        (
            GOOD.format(name="broken") + "from pydantic import BaseModel\nclass Settings(BaseModel): ...",
            "its 'Settings' must be a pydantic model with extra='forbid'",
        ),
        (
            GOOD.format(name="broken")
            + "from mini_infer.plugins import hookimpl\n@hookimpl\ndef schedular(context): ...",
            "there is no hook 'schedular'; did you mean 'scheduler'?",
        ),
        (
            GOOD.format(name="broken")
            + "from mini_infer.plugins import hookimpl\n@hookimpl\ndef scheduler(contxt): ...",
            "Argument(s) {'contxt'} are declared in the hookimpl but can not be found in the hookspec",
        ),
        (
            GOOD.format(name="broken") + "extra = 'speed'",
            "it needs not-there>=2: pip install 'acme-tools[speed]'",
        ),
        (
            GOOD.format(name="broken") + "def missing(): return 'it needs one of two cards'",
            "it needs one of two cards",
        ),
    ],
)
def test_a_broken_plugin_is_refused_with_distribution_version_and_reason(
    distributions: FakeDistributions, source: str, reason: str
) -> None:
    extras = "Provides-Extra: speed\nRequires-Dist: pluggy\nRequires-Dist: not-there>=2 ; extra == 'speed'\n"
    distributions.install("acme-tools", {"broken": source}, metadata=extras)
    with pytest.raises(PluginLoadError) as caught:
        manager("broken")
    message = str(caught.value)
    assert message.startswith("plugin 'broken' (acme-tools 1.2) cannot be used: ") and reason in message
    assert "\n" not in message


def test_an_extra_that_is_installed_is_no_obstacle(distributions: FakeDistributions) -> None:
    extras = "Provides-Extra: speed\nRequires-Dist: pluggy>=1 ; extra == 'speed'\n"
    distributions.install("acme-extra", {"fast": GOOD.format(name="fast") + "extra = 'speed'"}, metadata=extras)
    assert manager("fast").plugins[0].name == "fast"


def test_a_plugin_that_misses_nothing_is_used(distributions: FakeDistributions) -> None:
    distributions.install("acme-whole", {"whole": GOOD.format(name="whole") + "def missing(): return None"})
    assert manager("whole").plugins[0].name == "whole"


def test_unknown_names_are_told_with_the_nearest() -> None:
    known = [plugin("block-cache"), plugin("ngram")]
    with pytest.raises(PluginNotFoundError) as caught:
        manager("blck-cache", "ngrm", modules=known, without=["defalt"])
    assert str(caught.value).splitlines() == [
        "argument: without: no plugin 'defalt' is installed; did you mean 'default'?",
        "argument: plugins: no plugin 'blck-cache' is installed; did you mean 'block-cache'?",
        "argument: plugins: no plugin 'ngrm' is installed; did you mean 'ngram'?",
    ]


def test_the_same_name_from_two_distributions(distributions: FakeDistributions) -> None:
    for distribution in ("acme-a", "acme-b"):
        distributions.install(distribution, {"twin": GOOD.format(name="twin")})
    manager()
    with pytest.raises(PluginConflictError, match=r"'twin' comes from several places \(acme-. 1.2, acme-. 1.2\)"):
        manager("twin")


def test_plain_files_are_plugins(tmp_path: Path) -> None:
    tmp_path.joinpath("my_order.py").write_text(
        "from __future__ import annotations\nfrom pydantic import BaseModel\n"
        + GOOD.format(name="my-order")
        + "class Settings(BaseModel, extra='forbid'):\n    size: int = 1\n"
    )
    tmp_path.joinpath("_helper.py").write_text("1 / 0")
    tmp_path.joinpath("unused.py").write_text("1 / 0")
    found = manager("my-order", plugin_dirs=[str(tmp_path)], plugin={"my-order": {"size": 3}})
    assert asked(found).settings_of("my-order").size == 3
    tmp_path.joinpath("my_order.py").write_text("1 / 0")
    with pytest.raises(PluginLoadError, match=r"my_order.py\) cannot be used: its import failed: ZeroDivisionError"):
        manager("my-order", plugin_dirs=[str(tmp_path)])
    with pytest.raises(ConfigError, match="plugin_dirs: there is no folder 'nowhere'"):
        manager(plugin_dirs=["nowhere"])


def test_a_module_without_a_name() -> None:
    with pytest.raises(PluginLoadError, match=r"'json' \(in memory\) cannot be used: it has no 'name'"):
        manager(modules=[__import__("json")])


def test_two_engines_have_plugins_of_their_own() -> None:
    one, two = (answering("who", "scheduler", stub(Scheduler)()) for _ in range(2))
    first, second = manager("who", modules=[one]), manager("who", modules=[two])
    answers = [found.one("scheduler", asked(found), lambda: None) for found in (first, second)]
    assert answers[0] is not answers[1]


# Sets, order, and what is left out


@pytest.fixture
def small_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = {
        "default": PluginSet("", {"cpu": ("a", "b"), "cuda": ("c",)}),
        "quantization": PluginSet("", {"cuda": ("c",)}),
    }
    for module in ("plugin_system.sets", "plugin_system.manager"):
        monkeypatch.setattr(f"mini_infer.{module}.PLUGIN_SETS", sets)


ABC = [plugin("a"), plugin("b"), plugin("c")]


@pytest.mark.usefixtures("small_sets")
@pytest.mark.parametrize(
    ("device", "names", "without", "enabled"),
    [
        ("cpu", ["default", "c"], [], ["a", "b", "c"]),
        ("cpu", ["c", "default"], [], ["c", "a", "b"]),
        ("cpu", ["b", "default"], [], ["b", "a"]),
        ("cpu", ["b"], [], ["b"]),
        ("cpu", [], [], []),
        ("cpu", ["default"], ["a"], ["b"]),
        ("cpu", ["default", "c"], ["default"], ["c"]),
        ("cuda:1", ["default"], [], ["c"]),
        ("cuda:0", ["quantization"], [], ["c"]),
    ],
)
def test_sets_resolve_by_device_and_the_list_is_the_order(
    device: str, names: list[str], without: list[str], enabled: list[str]
) -> None:
    found = PluginManager(settings(*names, without=without), device=device, modules=ABC)
    assert [loaded.name for loaded in found.plugins] == enabled


@pytest.mark.usefixtures("small_sets")
def test_what_is_left_out_is_noted_and_an_empty_set_refused() -> None:
    found = manager("a", "default", modules=ABC, without=["a"])
    assert found.notes == ["plugin 'a' is left out by without = ['a'] (argument)"]
    with pytest.raises(PluginNotFoundError, match="plugins: the set 'quantization' has no plugin for cpu"):
        manager("quantization", modules=ABC)


def test_the_sets_that_users_know_are_there() -> None:
    assert set(PLUGIN_SETS) == {
        "default",
        "paged-attention",
        "speculative-decoding",
        "tensor-parallel",
        "quantization",
        "operator-fusion",
    }


# Relations


@pytest.mark.parametrize(
    ("plugins", "told"),
    [
        ([plugin("a", requires=("b",)), plugin("b")], None),
        ([plugin("a", requires=("tier",)), plugin("b", provides=("tier",))], None),
        ([plugin("a", requires=("paged-kv", "multi-token-verify"))], None),
        ([plugin("a", requires=("tier",), provides=("tier",))], "plugin 'a' (in memory) requires 'tier', which no"),
        (
            [plugin("a", conflicts=("b",)), plugin("b")],
            "'a' (in memory) conflicts with plugin 'b' (in memory) over 'b'",
        ),
        ([plugin("a"), plugin("b", conflicts=("x",)), plugin("c", provides=("x",))], "'b' (in memory) conflicts with"),
        ([plugin("a", conflicts=("x",), provides=("x",))], None),
    ],
)
def test_requires_and_conflicts(plugins: list[Any], told: str | None) -> None:
    names = [each.name for each in plugins]
    if told is None:
        assert [loaded.name for loaded in manager(*names, modules=plugins).plugins] == names
    else:
        with pytest.raises(PluginConflictError) as caught:
            manager(*names, modules=plugins)
        assert told in str(caught.value)


# Plugins' own settings


class CacheSettings(BaseModel, extra="forbid"):
    block_size: Literal[8, 16] = 16
    eviction: str = "lru"
    share: float = 0.5


def test_a_plugins_settings_are_read_by_its_own_model() -> None:
    chosen = load_settings(
        arguments={"plugins": ["block-cache"], "plugin": {"block-cache": {"eviction": "lfu"}}},
        environ={"MINI_INFER_PLUGIN__BLOCK_CACHE__BLOCK_SIZE": "8"},
        overrides={"plugin.block-cache.share": "1e-2"},
    )
    found = PluginManager(chosen, device="cpu", modules=[plugin("block-cache", Settings=CacheSettings)])
    assert asked(found).settings_of("block-cache", CacheSettings) == CacheSettings(
        block_size=8, eviction="lfu", share=0.01
    )


def test_wrong_tables_of_plugins_are_all_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mini-infer.toml").write_text(
        'plugins = ["block-cache", "bare"]\n[plugin.block-cache]\nblock_sise = 8\nshare = "much"\n'
        "[plugin.bare]\nx = 1\n[plugin.blck-cache]\n[plugin.idle]\nx = 1\n"
    )
    modules = [plugin("block-cache", Settings=CacheSettings), plugin("bare"), plugin("idle")]
    with pytest.raises(ConfigError) as caught:
        PluginManager(load_settings(environ={}), device="cpu", modules=modules)
    assert sorted(str(caught.value).splitlines()) == [
        "mini-infer.toml:3: unknown key 'plugin.block-cache.block_sise'; did you mean 'block_size'?",
        "mini-infer.toml:4: 'plugin.block-cache.share' should be a valid number, not 'much'",
        "mini-infer.toml:5: plugin 'bare' (in memory) has no settings",
        "mini-infer.toml:7: unknown key 'plugin.blck-cache'; did you mean 'block-cache'?",
    ]


def test_a_table_of_a_plugin_that_is_not_enabled_is_noted() -> None:
    found = manager(modules=[plugin("idle", Settings=CacheSettings)], plugin={"idle": {"share": 1.0}})
    assert found.notes == ["argument: the table 'plugin.idle' has no effect: that plugin is not enabled"]


def test_asking_for_settings_that_are_not_there() -> None:
    context = asked(manager("a", modules=[plugin("a", Settings=CacheSettings)]))
    with pytest.raises(PluginError, match="no enabled plugin 'b' has settings; those that have: a"):
        context.settings_of("b")
    with pytest.raises(PluginError, match="the settings of plugin 'a' are CacheSettings, not Settings"):
        context.settings_of("a", Settings)


# Answers


def test_one_answer_or_the_cores() -> None:
    answer, reference = stub(Scheduler)(), stub(Scheduler)()
    found = manager(
        "mine", "none", modules=[answering("mine", "scheduler", answer), answering("none", "scheduler", None)]
    )
    assert found.one("scheduler", asked(found), lambda: reference) is answer
    assert found.one("cache_policy", asked(found), lambda: reference) is reference
    assert found.answered == {"scheduler": "mine", "cache_policy": "core"}


def test_two_answers_are_a_conflict_that_names_both() -> None:
    found = manager("a", "b", modules=[answering(name, "scheduler", stub(Scheduler)()) for name in "ab"])
    with pytest.raises(PluginConflictError) as caught:
        found.one("scheduler", asked(found), lambda: None)
    assert "plugin 'a' (in memory) and plugin 'b' (in memory) each bring a scheduler" in str(caught.value)


def test_lists_come_in_the_order_of_the_setting() -> None:
    observers = [stub(Observer)() for _ in range(4)]
    modules = [answering(name, "extensions", [observer]) for name, observer in zip("abcd", observers, strict=True)]
    found = manager("c", "a", "d", "b", modules=modules)
    expected = [observers[2], observers[0], observers[3], observers[1]]
    assert found.many("extensions", asked(found)) == expected


@pytest.mark.parametrize("order", [["first", "wrapper"], ["wrapper", "first"]])
def test_a_wrapper_sees_the_answer_of_the_others_or_the_cores(order: list[str]) -> None:
    wrapped, reference, answer = (stub(Scheduler)() for _ in range(3))
    observers, seen = [stub(Observer)(), stub(Observer)()], []

    @hookimpl(wrapper=True, specname="scheduler")
    def wrap(context: Any) -> Any:
        seen.append((yield))
        return wrapped

    @hookimpl(wrapper=True, specname="extensions")
    def reverse(context: Any) -> Any:
        return [list(reversed((yield)[0]))]

    first = answering("first", "scheduler", answer, more=hookimpl(specname="extensions")(lambda context: observers))
    wrapper = plugin("wrapper", wrap=wrap, reverse=reverse)
    found = manager(*order, modules=[first, wrapper])
    assert found.one("scheduler", asked(found), lambda: reference) is wrapped
    assert found.many("extensions", asked(found)) == observers[::-1]
    alone = manager("wrapper", modules=[wrapper])
    assert alone.one("scheduler", asked(alone), lambda: reference) is wrapped
    assert seen == [answer, reference]


@pytest.mark.parametrize(
    ("hook", "answer", "told"),
    [
        ("scheduler", None, "its hook 'scheduler' must answer with Scheduler, not None"),
        ("extensions", [[3]], "its hook 'extensions' must answer with Observer or ServerExtension, not 3"),
        ("extensions", [3], "its hook 'extensions' must return a list, not 3"),
        ("extensions", None, "its hook 'extensions' must return a list, not None"),
    ],
)
def test_a_wrapper_that_returns_the_wrong_thing_is_named(hook: str, answer: Any, told: str) -> None:
    @hookimpl(wrapper=True, specname=hook)
    def wrap(context: Any) -> Any:
        yield
        return answer

    found = manager("w", modules=[plugin("w", wrap=wrap)])
    with pytest.raises(PluginLoadError) as caught:
        if hook == "extensions":
            found.many(hook, asked(found))
        else:
            found.one(hook, asked(found), stub(Scheduler))
    assert str(caught.value) == f"plugin 'w' (in memory) cannot be used: {told}"


def test_a_wrapper_that_fails_is_named() -> None:
    @hookimpl(wrapper=True, specname="scheduler")
    def wrap(context: Any) -> Any:
        yield
        raise ValueError("no")

    found = manager("w", modules=[plugin("w", wrap=wrap)])
    with pytest.raises(PluginLoadError, match=r"a wrapper of hook 'scheduler' failed \(w\): ValueError: no"):
        found.one("scheduler", asked(found), lambda: None)


@pytest.mark.parametrize(
    ("hook", "answer", "reason"),
    [
        ("scheduler", ValueError("bad"), "its hook 'scheduler' failed: ValueError: bad"),
        ("scheduler", ImportError("no torch"), "its hook 'scheduler' failed: ImportError: no torch"),
        ("scheduler", 3, "its hook 'scheduler' must answer with Scheduler, not 3"),
        ("scheduler", stub(CachePolicy)(), "its hook 'scheduler' must answer with Scheduler, not <"),
        ("extensions", None, "its hook 'extensions' must return a list, not None"),
        ("extensions", [3], "its hook 'extensions' must answer with Observer or ServerExtension, not 3"),
        (
            "attention_backends",
            [stub(Observer)],
            "its hook 'attention_backends' must answer with AttentionBackend, not <",
        ),
    ],
)
def test_a_wrong_answer_names_the_plugin(hook: str, answer: Any, reason: str) -> None:
    found = manager("bad", modules=[answering("bad", hook, answer)])
    ask = found.many if hook in ("extensions", "attention_backends") else lambda *a: found.one(*a, lambda: None)
    with pytest.raises(PluginLoadError) as caught:
        ask(hook, asked(found))
    assert str(caught.value).startswith(f"plugin 'bad' (in memory) cannot be used: {reason}")


def test_a_plugin_may_refuse_in_its_own_words() -> None:
    found = manager("bad", modules=[answering("bad", "scheduler", ConfigError("too small: raise it"))])
    with pytest.raises(ConfigError, match="too small: raise it"):
        found.one("scheduler", asked(found), lambda: None)


def test_attention_backends_are_classes() -> None:
    backend = stub(AttentionBackend)
    found = manager("fast", modules=[answering("fast", "attention_backends", [backend])])
    assert found.many("attention_backends", asked(found)) == [backend]


# Model families and weight loaders


def install_models(distributions: FakeDistributions) -> None:
    distributions.install(
        "acme-models",
        {
            "family": ADAPTER.format(name="family", hook="model_adapters", interface="ModelAdapter"),
            "format": ADAPTER.format(name="format", hook="weight_loaders", interface="WeightLoader"),
            "ruin": "1 / 0",
        },
        group="mini_infer.models",
    )


def test_models_need_no_naming_and_a_broken_one_is_passed_over_with_a_line(distributions: FakeDistributions) -> None:
    install_models(distributions)
    found, log = manager(), list[str]()
    context = asked(found, log)
    assert "acme_models_family" not in sys.modules
    assert "family" in [adapter.name for adapter in found.model_adapters(context)]
    assert "format" in [loader.name for loader in found.weight_loaders(context)]
    assert sum("plugin 'ruin' (acme-models 1.2) cannot be used" in line for line in log) == 1


def test_naming_pins_the_choice_and_without_takes_one_away(distributions: FakeDistributions) -> None:
    install_models(distributions)
    adapter = stub(ModelAdapter)()
    pinned = manager("mine", modules=[answering("mine", "model_adapters", [adapter])])
    assert pinned.model_adapters(asked(pinned)) == [adapter]
    assert all(isinstance(loader, WeightLoader) for loader in pinned.weight_loaders(asked(pinned)))
    named = manager("family")
    assert [adapter.name for adapter in named.model_adapters(asked(named))] == ["family"]
    fewer = manager(without=["family"])
    assert "family" not in [adapter.name for adapter in fewer.model_adapters(asked(fewer))]


# Rows for `mini-infer plugins`


def test_rows_tell_why_and_import_nothing_more(distributions: FakeDistributions) -> None:
    install_models(distributions)
    distributions.install(
        "acme-rows", {"good": GOOD.format(name="good") + "provides = ('tier',)", "bad": "1 / 0", "idle": "1 / 0"}
    )
    rows = {row.name: row for row in describe_plugins(settings("good", "bad", without=["idle"]), "cpu")}
    assert list(rows)[:2] == ["good", "bad"]
    good = rows["good"]
    assert (good.version, good.source, good.provides, good.enabled) == ("1.2", "acme-rows", ("tier",), True)
    assert good.why == "named in plugins (argument)"
    assert not rows["bad"].enabled and "ZeroDivisionError" in rows["bad"].why
    assert rows["idle"].why == "not named in plugins"
    assert rows["family"].why == "used when a model asks for it"
    assert "acme_rows_idle" not in sys.modules and "acme_models_family" not in sys.modules

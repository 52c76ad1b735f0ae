"""Every hook is specified, documented in docs/hooks.md, and reaches the engine; the page's example works."""

import inspect
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.core.fake_plugins import plugin, stub

from mini_infer import hookspecs, interfaces
from mini_infer.plugin_system.manager import PluginManager
from mini_infer.plugins import hookimpl
from mini_infer.settings import load_settings

HOOKS = (*hookspecs.ONE_ANSWER, *hookspecs.LISTS)
PAGE = (Path(__file__).parents[2] / "docs" / "hooks.md").read_text()
ANSWERS = {
    "scheduler": interfaces.Scheduler,
    "cache_policy": interfaces.CachePolicy,
    "sampler": interfaces.Sampler,
    "executor": interfaces.Executor,
    "step_runner": interfaces.StepRunner,
    "proposer": interfaces.Proposer,
    "model_adapters": interfaces.ModelAdapter,
    "weight_loaders": interfaces.WeightLoader,
    "attention_backends": interfaces.AttentionBackend,
    "scheduling_policies": interfaces.OrderPolicy,
    "logits_processors": interfaces.LogitsProcessor,
    "model_transforms": interfaces.ModelTransform,
    "extensions": interfaces.ServerExtension,
}


def test_there_are_thirteen_hooks_and_no_other() -> None:
    specified = [name for name, value in vars(hookspecs).items() if hasattr(value, "mini_infer_spec")]
    assert sorted(specified) == sorted(HOOKS) and len(HOOKS) == 13


@pytest.mark.parametrize("hook", HOOKS)
def test_each_hook_takes_the_context_and_is_documented(hook: str) -> None:
    function = getattr(hookspecs, hook)
    assert list(inspect.signature(function).parameters) == ["context"]
    assert function.__doc__.startswith("Returns ")
    section = re.search(rf"^### {hook}\n(.+?)\n$", PAGE, re.MULTILINE | re.DOTALL)
    assert section is not None and ANSWERS[hook].__name__ in section[1]


@pytest.mark.parametrize("hook", HOOKS)
def test_each_hook_reaches_the_engine(hook: str) -> None:
    answer = stub(ANSWERS[hook]) if hook == "attention_backends" else stub(ANSWERS[hook])()
    seen = []

    @hookimpl(specname=hook)
    def implementation(context: Any) -> Any:
        seen.append(context)
        return answer if hook in hookspecs.ONE_ANSWER else [answer]

    module = plugin("one", implementation=implementation)
    manager = PluginManager(load_settings(arguments={"plugins": ["one"]}, environ={}), device="cpu", modules=[module])
    context = manager.context(dtype="float32", log=print)
    if hook in hookspecs.ONE_ANSWER:
        assert manager.one(hook, context, lambda: None) is answer
    else:
        assert manager.many(hook, context) == [answer]
    assert seen == [context]


def test_the_example_of_the_page_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    source = re.search(r"```python\n(.+?)```", PAGE, re.DOTALL)
    settings = re.search(r"```toml\n(plugins.+?)```", PAGE, re.DOTALL)
    assert source is not None and settings is not None
    monkeypatch.chdir(tmp_path)
    tmp_path.joinpath("my_plugins").mkdir()
    tmp_path.joinpath("my_plugins", "never_say.py").write_text(source[1])
    tmp_path.joinpath("mini-infer.toml").write_text(settings[1].replace('"default", ', ""))
    assert tomllib.loads(settings[1])["plugins"][0] == "default"
    manager = PluginManager(load_settings(environ={}), device="cpu")
    (processor,) = manager.many("logits_processors", manager.context(dtype="float32", log=print))
    assert processor.wants(SimpleNamespace())
    logits = processor.apply(torch.zeros(2, 20), SimpleNamespace(), [1])
    assert logits[1, 13] == float("-inf") and torch.isfinite(logits).sum() == 39

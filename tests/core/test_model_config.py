"""From the setting ``model`` to a ModelConfig, and every way in which that fails."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from mini_infer.errors import ConfigError
from mini_infer.model.config import flatten_hf_config, locate_model, make_model_config, read_hf_config, resolve_dtype
from mini_infer.model.loading import choose_adapter
from mini_infer.testing.models import tiny_config
from mini_infer.testing.toy_model import ToyAdapter

if TYPE_CHECKING:
    from mini_infer.interfaces import ModelAdapter


def test_what_is_there_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    file = tmp_path / "model.gguf"
    file.touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate_model("owner/name") == Path("owner/name")
    assert locate_model(str(file)) == file
    assert locate_model("~/model.gguf") == file


@pytest.mark.parametrize("model", ["/no/such/folder", "./nothing", "nothing", "a/b/c", "../x"])
def test_a_missing_folder_says_what_to_give(model: str) -> None:
    with pytest.raises(ConfigError, match=r"^model folder .* does not exist; give the folder that holds config\.json"):
        locate_model(model)


@pytest.mark.parametrize("model", ["x" * 5000, "/" + "x" * 5000, "~no-such-user/x"], ids=lambda model: model[:9])
def test_a_folder_that_cannot_be_looked_at(model: str) -> None:
    with pytest.raises(ConfigError, match=r"^model folder .* cannot be read: \w+"):
        locate_model(model)


def test_a_folder_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # root may read all
    with pytest.raises(ConfigError, match=r"^model folder .* cannot be read: Permission denied$"):
        locate_model(str(tmp_path))


def test_a_missing_gguf_file() -> None:
    with pytest.raises(ConfigError, match=r"model file a/b\.gguf does not exist"):
        locate_model("a/b.gguf")


def test_the_hub_is_asked_for_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def download(repo_id: str, **options: Any) -> str:
        asked.append({"repo_id": repo_id, **options})
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert locate_model("owner/name", revision="v2", offline=True) == tmp_path
    locate_model("owner/name", weights=False)
    assert (asked[0]["repo_id"], asked[0]["revision"], asked[0]["local_files_only"]) == ("owner/name", "v2", True)
    assert "*.safetensors" in asked[0]["allow_patterns"]
    assert not {"*.safetensors", "*.bin"} & set(asked[1]["allow_patterns"])


def test_what_the_hub_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx
    from huggingface_hub import errors

    response = httpx.Response(404, request=httpx.Request("GET", "https://hub"))
    cases: list[tuple[Exception, str]] = [
        (errors.GatedRepoError("x", response=response), "owner/name is gated: accept its terms"),
        (errors.RevisionNotFoundError("x", response=response), "has no revision v2; set engine.revision"),
        (errors.RepositoryNotFoundError("x", response=response), "neither a folder here nor on the Hub"),
        (errors.LocalEntryNotFoundError("x"), "owner/name at revision v2 is not on this machine and the Hub cannot be"),
        (errors.OfflineModeIsEnabled("x"), "is not on this machine and"),
        (errors.HfHubHTTPError("busy\nmore", response=response), "cannot be fetched from the Hub: busy$"),
        (OSError("disk full"), "cannot be fetched from the Hub: disk full$"),
    ]
    for error, message in cases:

        def refuse(*_: Any, _error: Exception = error, **__: Any) -> str:
            raise _error

        monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
        with pytest.raises(ConfigError, match=message):
            locate_model("owner/name", revision="v2")


def test_offline_without_a_download_ends_at_once() -> None:
    with pytest.raises(ConfigError, match=r"nobody/nothing is not on this machine and engine\.offline is set"):
        locate_model("nobody/nothing", offline=True)


def test_reads_plain_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("toy")))
    assert read_hf_config(tmp_path)["architectures"] == ["ToyForCausalLM"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is no model folder: it has no config.json"),
        ("{", "cannot be read as JSON"),
        ("[]", "must hold a JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
    ],
    ids=["none", "cut", "list", "deep"],
)
def test_configs_that_cannot_be_read(content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_hf_config(tmp_path)


def test_nested_text_config_is_lifted() -> None:
    nested = {"architectures": ["Outer"], "vocab_size": 1, "text_config": {"vocab_size": 2, "architectures": ["Inner"]}}
    assert flatten_hf_config(nested) == {"architectures": ["Outer"], "vocab_size": 2}


@pytest.mark.parametrize(
    ("setting", "hf", "device", "dtype"),
    [
        ("auto", {"torch_dtype": "bfloat16"}, "cpu", torch.float32),
        ("auto", {"torch_dtype": "float16"}, "cuda:0", torch.float16),
        ("auto", {"dtype": "bfloat16"}, "cuda:0", torch.bfloat16),
        ("auto", {"dtype": "float32"}, "cuda:0", torch.float32),
        ("auto", {}, "cuda:0", torch.bfloat16),
        ("bfloat16", {"dtype": "float32"}, "cpu", torch.bfloat16),
    ],
)
def test_dtype(setting: str, hf: dict[str, Any], device: str, dtype: torch.dtype) -> None:
    assert resolve_dtype(setting, hf, device) is dtype


def test_dtypes_that_we_do_not_have() -> None:
    with pytest.raises(ConfigError, match=r"config\.json: dtype 'float8_e4m3fn' is not supported; set engine\.dtype"):
        resolve_dtype("auto", {"dtype": "float8_e4m3fn"}, "cuda:0")


def test_the_longest_sequence_counts_the_scaling() -> None:
    hf = tiny_config("toy", rope_scaling={"type": "linear", "factor": 4.0})
    config = make_model_config(hf, device="cpu")
    assert (config.max_position_embeddings, config.vocab_size) == (2048, 320)


@pytest.mark.parametrize("key", ["vocab_size", "max_position_embeddings"])
def test_configs_that_lack_what_the_core_needs(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} must be"):
        make_model_config(tiny_config("toy", **{key: None}), device="cpu")


def test_the_adapter_is_chosen_by_architecture() -> None:
    adapters: list[ModelAdapter] = [ToyAdapter()]
    assert choose_adapter(adapters, tiny_config("toy")) is adapters[0]
    with pytest.raises(ConfigError, match="architecture GPT9LMHeadModel is not supported; supported: ToyForCausalLM"):
        choose_adapter(adapters, {"architectures": ["GPT9LMHeadModel"]})
    with pytest.raises(ConfigError, match=r"config\.json without architectures is not supported; supported: none"):
        choose_adapter([], {})

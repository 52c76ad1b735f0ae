"""A checkpoint as the build step sees it: found, described and laid out without weights; then loaded.

Contract: ``find_checkpoint`` reads names and small files only, so that ``serve --dry-run`` is quick; every "auto" that
it resolves becomes a ``Choice``.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from mini_infer.choices import Choice
from mini_infer.interfaces import CausalLM
from mini_infer.layers.attention import Attention
from mini_infer.model.config import flatten_hf_config, locate_model, make_model_config, read_hf_config
from mini_infer.model.demo import DEMO, demo_gguf_path
from mini_infer.model.generation_config import GenerationConfig, load_generation_config
from mini_infer.model.loading import choose_adapter, choose_loader, load_module

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from mini_infer.build_context import BuildContext
    from mini_infer.interfaces import ModelAdapter, ModelConfig, ModelTransform, WeightLoader
    from mini_infer.plugin_system.manager import PluginManager
    from mini_infer.settings import EngineSettings, Settings
    from mini_infer.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """What is known before any weight is read.

    Attributes:
        path: the folder or file that holds the weights.
        config: the model's description.
        adapter: its family.
        loader: its weight format.
        choices: for each "auto" resolved here.
    """

    path: Path
    config: "ModelConfig"
    adapter: "ModelAdapter"
    loader: "WeightLoader"
    choices: list[Choice]

    @property
    def dtype_name(self) -> str:
        """Such as ``float32``."""
        return str(self.config.dtype).removeprefix("torch.")

    def on_paper(self) -> "nn.Module":
        """The module without memory."""
        with torch.device("meta"):
            return self.adapter.build(self.config)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A module with its weights, transformed; and what belongs to it."""

    module: "nn.Module"
    config: "ModelConfig"
    tokenizer: "Tokenizer | None"
    generation: GenerationConfig

    @property
    def causal_lm(self) -> CausalLM:
        """The module as the worker calls it."""
        return cast("CausalLM", self.module)


def attention_layers(module: "nn.Module") -> list[Attention]:
    """Every attention layer, in the module's order."""
    return [layer for layer in module.modules() if isinstance(layer, Attention)]


def find_checkpoint(settings: "Settings", manager: "PluginManager", context: "BuildContext") -> FoundCheckpoint:
    """Locate the model, choose its loader and family, and read its description.

    Raises:
        ConfigError: there is no such model, or nothing installed serves it.
    """
    engine = settings.engine
    adapters, loaders = manager.model_adapters(context), manager.weight_loaders(context)
    path = _locate(settings, loaders)
    loader = choose_loader(loaders, path, engine.load_format)
    carried = loader.hf_config(path)
    hf = read_hf_config(loader.prepare(path)) if carried is None else flatten_hf_config(carried)
    adapter = choose_adapter(adapters, hf)
    config = make_model_config(hf, device=context.device, dtype=engine.dtype, path=path)
    if engine.max_model_len != "auto" and engine.max_model_len < config.max_position_embeddings:
        config = replace(config, max_position_embeddings=engine.max_model_len)
    adapter.check(config)
    found = FoundCheckpoint(path, config, adapter, loader, [])
    found.choices.extend(_choices(engine, found))
    return found


def _locate(settings: "Settings", loaders: "Sequence[WeightLoader]") -> Path:
    model, engine = settings.model, settings.engine
    if model == DEMO:
        return demo_gguf_path()
    named = next((path for loader in loaders if (path := loader.locate(model)) is not None), None)
    if named is not None:
        return named
    return locate_model(model, revision=engine.revision, offline=engine.offline, weights=engine.load_format != "random")


def _choices(engine: "EngineSettings", found: FoundCheckpoint) -> list[Choice]:
    choices = []
    if engine.dtype == "auto":
        reason = "the fastest on a CPU" if found.config.device == "cpu" else "the checkpoint's own"
        choices.append(Choice("engine.dtype", found.dtype_name, reason))
    if engine.load_format == "auto":
        choices.append(Choice("engine.load_format", found.loader.name, f"the format of {found.path.name}"))
    return choices


def load_checkpoint(found: FoundCheckpoint, settings: "Settings", transforms: "list[ModelTransform]") -> LoadedModel:
    """Read the weights, apply the transforms in order, load the tokenizer.

    Raises:
        ConfigError: weights, transforms or tokenizer do not fit.
    """
    module = load_module(found.adapter, found.loader, found.path, found.config)
    for transform in transforms:
        module = transform.apply(module, found.config)
    folder = found.loader.prepare(found.path)
    ignored = settings.engine.generation_config == "ignore"
    generation = GenerationConfig() if ignored else load_generation_config(folder)
    return LoadedModel(module, found.config, _tokenizer(folder, settings.engine), generation)


def _tokenizer(folder: Path, engine: "EngineSettings") -> "Tokenizer | None":
    if engine.skip_tokenizer:
        return None
    from mini_infer.text.hf_tokenizer import load_tokenizer

    return load_tokenizer(folder)

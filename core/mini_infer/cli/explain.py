"""Prints settings and the engine that they compose.

Contract: nothing is loaded but plugins and small files of the model; what is printed is what ``serve`` would run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from mini_infer.cli.common import print_table
from mini_infer.settings import leaf_keys

if TYPE_CHECKING:
    from pydantic import BaseModel

    from mini_infer.build import Composition
    from mini_infer.choices import Choice
    from mini_infer.settings import Settings

SECRET = "server.api_keys"


def print_values(settings: Settings) -> None:
    """Prints each effective value of the core's settings with its source."""
    rows = [(key, _value(settings, key), settings.source_of(key)) for key in leaf_keys(settings)]
    _print_rows("setting", "value", "source", rows)


def print_engine(settings: Settings) -> None:
    """Composes the engine and prints its plugins, their settings, its parts, and every choice that was made.

    Raises:
        MiniInferError: there is no such engine.
    """
    from mini_infer.build import compose

    composition = compose(settings)
    plugins = composition.manager.plugin_settings
    rows = [
        (f"plugin.{name}.{key}", _value(values, key), settings.source_of(f"plugin.{name}.{key}"))
        for name, values in plugins.items()
        for key in leaf_keys(values)
    ]
    if rows:
        _print_rows("plugin setting", "value", "source", rows)
    _print_rows("part", "is", "from", [*_model(composition), *_parts(composition)])
    if settings.engine.generation_config == "auto":
        _print_generation(composition)
    _print_choices(composition.choices)
    for line in [*composition.log, _memory_note(composition)]:
        click.echo(line)


def _model(composition: Composition) -> list[tuple[str, str, str]]:
    found, context = composition.found, composition.context
    return [
        ("model", composition.settings.model, str(found.path)),
        ("device and dtype", f"{context.device}, {context.dtype}", ""),
        ("model family", found.adapter.name, type(found.adapter).__module__),
        ("weights", found.loader.name, type(found.loader).__module__),
        *(
            (f"attention over {spec.kind} caches", backend.name, backend.__module__)
            for spec, backend in composition.backends.items()
        ),
    ]


def _parts(composition: Composition) -> list[tuple[str, str, str]]:
    """Each part that a hook decides: what it is, and the plugin or the core that brings it."""
    from mini_infer.hookspecs import ONE_ANSWER

    manager, context = composition.manager, composition.context
    rows = [("plugin", name, why) for name, why in manager.resolution.enabled.items()]
    for hook in ONE_ANSWER:
        answer = manager.one(hook, context, lambda: None)
        name = "the reference" if answer is None and hook != "proposer" else _name(answer)
        rows.append((hook.replace("_", " "), name, manager.answered[hook]))
    for hook in ("logits_processors", "model_transforms", "extensions"):
        for answer in manager.many(hook, context):
            rows.append((hook.replace("_", " ").removesuffix("s"), _name(answer), type(answer).__module__))
    return rows


def _print_generation(composition: Composition) -> None:
    """Prints what the checkpoint says about generating, and in which of its files."""
    from mini_infer.model.generation_config import load_generation_config

    generation = load_generation_config(composition.found.loader.prepare(composition.found.path))
    rows = [(name, str(getattr(generation, name)), file) for name, file in generation.sources.items()]
    if rows:
        _print_rows("generation default", "value", "source", rows)


def _memory_note(composition: Composition) -> str:
    from mini_infer.build.attention_choice import choose_block_size
    from mini_infer.build.kv_memory import DeviceMemory, free_memory, plan_kv_memory
    from mini_infer.model.checkpoint import attention_layers

    engine, found = composition.settings.engine, composition.found
    module, device = found.on_paper(), composition.context.device
    weights, (free, total) = sum(weight.nbytes for weight in module.parameters()), free_memory(device)
    note = plan_kv_memory(
        engine,
        [layer.spec for layer in attention_layers(module)],
        block_size=choose_block_size(engine.block_size, list(composition.backends.values())),
        memory=DeviceMemory(device, free - weights, total),
        model_max_len=found.config.max_position_embeddings,
    ).note
    return note if device == "cpu" else f"{note}; less what the largest step takes, which is measured at the start"


def _name(answer: Any) -> str:
    return "none" if answer is None else str(getattr(answer, "name", type(answer).__name__))


def _value(model: BaseModel, key: str) -> str:
    value: Any = model
    for part in key.split("."):
        value = getattr(value, part)
    if key == SECRET and value:
        return f"{len(value)} keys"
    if value is None or isinstance(value, bool):
        return {None: "unset", True: "true", False: "false"}[value]
    if isinstance(value, tuple):
        return "[" + ", ".join(f'"{item}"' for item in value) + "]"
    return str(value)


def _print_rows(first: str, second: str, third: str, rows: list[tuple[str, str, str]]) -> None:
    print_table((first, second, third), rows)
    click.echo()


def _print_choices(choices: list[Choice]) -> None:
    for choice in choices:
        click.echo(f"{choice.name} = {choice.chosen}: {choice.reason}")
        for name, why in choice.rejected:
            click.echo(f"  not {name}: {why}")
    click.echo()

"""The JSON Schema of ``mini-infer.toml`` on this machine: the core's tables and those of all installed plugins.

Contract: plugins are imported for their ``Settings``; one that cannot be is left out and named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic.json_schema import models_json_schema

from mini_infer.errors import PluginError
from mini_infer.plugin_system.contract import load_plugin
from mini_infer.plugin_system.index import discover
from mini_infer.settings.schema import Settings

if TYPE_CHECKING:
    from pydantic import BaseModel

TEMPLATE = "#/$defs/{model}"


def settings_schema() -> tuple[dict[str, Any], list[str]]:
    """Returns the schema, and one line for each plugin that is left out."""
    index = discover(())
    models: dict[str, type[BaseModel]] = {}
    skipped: list[str] = []
    for name in index.names():
        try:
            plugin = load_plugin(index.get(name))
        except PluginError as e:
            skipped.append(f"left out: {e}")
            continue
        if plugin.settings_model is not None:
            models[name] = plugin.settings_model
    every = [(model, "validation") for model in (Settings, *models.values())]
    references, definitions = models_json_schema(every, ref_template=TEMPLATE)  # type: ignore[arg-type]
    schema = definitions["$defs"].pop(references[(Settings, "validation")]["$ref"].rpartition("/")[2])
    schema["properties"]["plugin"] = {
        "description": schema["properties"]["plugin"]["description"],
        "type": "object",
        "properties": {name: references[(model, "validation")] for name, model in models.items()},
        "additionalProperties": False,
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, **definitions}, skipped

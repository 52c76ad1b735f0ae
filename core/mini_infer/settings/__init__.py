"""Settings: what can be set, where each value came from, and errors that name file, line and nearest key."""

from mini_infer.settings.schema import (
    DEFAULT_CONFIG,
    EngineSettings,
    ServerSettings,
    Settings,
    leaf_keys,
    load_settings,
    parse_share,
    parse_size,
)

__all__ = [
    "DEFAULT_CONFIG",
    "EngineSettings",
    "ServerSettings",
    "Settings",
    "leaf_keys",
    "load_settings",
    "parse_share",
    "parse_size",
]

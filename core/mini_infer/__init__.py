"""Mini-Infer: an LLM inference engine in which every optimisation is a plugin.

Contract: importing this imports nothing heavy; each name below brings its module when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mini_infer.async_llm import AsyncLLM
    from mini_infer.errors import (
        ConfigError,
        EngineError,
        MiniInferError,
        PluginConflictError,
        PluginError,
        PluginLoadError,
        PluginNotFoundError,
        RequestError,
    )
    from mini_infer.frontend import RequestOptions
    from mini_infer.llm import LLM
    from mini_infer.outputs import CompletionOutput, Delta, Logprob, RequestOutput
    from mini_infer.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "ConfigError",
    "Delta",
    "EngineError",
    "Logprob",
    "MiniInferError",
    "PluginConflictError",
    "PluginError",
    "PluginLoadError",
    "PluginNotFoundError",
    "RequestError",
    "RequestOptions",
    "RequestOutput",
    "SamplingParams",
]

_MODULES = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "RequestOptions": "frontend",
    "SamplingParams": "sampling_params",
    **dict.fromkeys(("CompletionOutput", "Delta", "Logprob", "RequestOutput"), "outputs"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'mini_infer' has no attribute {name!r}")
    value = getattr(import_module(f"mini_infer.{_MODULES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

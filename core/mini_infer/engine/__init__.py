"""The host's half of a step: requests, blocks, the plan, the loop."""

from mini_infer.engine.engine import Engine, EngineLimits, EngineParts

__all__ = ["Engine", "EngineLimits", "EngineParts"]

"""The host's half of a step: requests, blocks, the plan, the loop."""

from mini_infer.engine.engine import Engine
from mini_infer.engine.parts import EngineLimits, EngineParts

__all__ = ["Engine", "EngineLimits", "EngineParts"]

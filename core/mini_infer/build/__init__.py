"""From settings to a running engine."""

from mini_infer.build.builder import BuiltEngine, build_engine
from mini_infer.build.composition import Composition, compose

__all__ = ["BuiltEngine", "Composition", "build_engine", "compose"]

"""From settings to a running engine."""

from mini_infer.build.builder import BuiltEngine, Composition, build_engine, compose

__all__ = ["BuiltEngine", "Composition", "build_engine", "compose"]

"""Calls into policies. What one raises is a broken promise of its own, a ``PluginError``, and no request's fault."""

from types import TracebackType
from typing import TYPE_CHECKING

from mini_infer.errors import MiniInferError, PluginError, in_one_line

if TYPE_CHECKING:
    from typing import Self


class Asking:
    """``with Asking("scheduler", it): it.schedule(...)``; one may be used again and again.

    Args:
        kind: what the plugin is.
        plugin: the object asked.
    """

    __slots__ = ("name",)

    def __init__(self, kind: str, plugin: object) -> None:
        self.name = f"{kind} {type(plugin).__name__}"

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        if isinstance(error, Exception) and not isinstance(error, MiniInferError):
            raise PluginError(f"{self.name} failed: {in_one_line(error)}") from error

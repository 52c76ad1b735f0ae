"""Calls into policies. What one raises is a broken promise of its own, a ``PluginError``, and no request's fault.

But for a logits processor that is asked about a request: there the request is at fault, and refused.
"""

from types import TracebackType
from typing import TYPE_CHECKING

from mini_infer.errors import MiniInferError, PluginError, RequestError, in_one_line

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Self

    from mini_infer.interfaces import LateLogitsProcessor, LogitsProcessor
    from mini_infer.sampling_params import SamplingParams


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


def check_extensions(processors: "Iterable[LogitsProcessor | LateLogitsProcessor]", params: "SamplingParams") -> None:
    """Ask each processor whether it can take the request; only the engine's own process has them.

    Raises:
        RequestError: what a request gives one is malformed.
    """
    for processor in processors:
        try:
            processor.wants(params)
        except RequestError:
            raise
        except Exception as error:
            message = f"logits processor '{processor.name}' cannot take this request: {in_one_line(error)}"
            raise RequestError(message, param=processor.name) from error

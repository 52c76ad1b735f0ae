"""Every error that a user can meet. Each message is one plain line that says what to do."""


def in_one_line(error: BaseException) -> str:
    """An exception as a part of our line: what it says, and of somebody else's code its class."""
    if isinstance(error, MiniInferError):
        return " ".join(str(error).split())
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")


class MiniInferError(Exception):
    """The root of all errors that this engine raises on purpose."""


class ConfigError(MiniInferError):
    """Settings, model folder or memory do not fit together; nothing was started."""


class PluginError(MiniInferError):
    """A plugin broke the contract, or cannot be used."""


class PluginNotFoundError(PluginError):
    """No installed plugin has that name."""


class PluginLoadError(PluginError):
    """The plugin was found but its module, settings or version is wrong."""


class PluginConflictError(PluginError):
    """Two enabled plugins exclude each other, or a requirement is missing."""


class RequestError(MiniInferError):
    """One request is wrong; others go on. The server answers it with HTTP 4xx.

    Args:
        message: what is wrong and what would be right.
        param: the request field at fault, as the client named it.
        code: a stable word for programs, such as ``context_length_exceeded``.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class EngineError(MiniInferError):
    """The engine itself failed; it serves nothing any more."""


class DeviceError(EngineError):
    """The device failed, and with it the engine."""

"""ServerExtension: routes and middleware that a plugin adds to the server."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar


class ServerExtension(ABC):
    """Applied in settings order when the Litestar application is made."""

    name: ClassVar[str]

    @abstractmethod
    def configure(self, app_config: Any) -> Any:
        """Take and return ``litestar.config.app.AppConfig`` (typed loosely: the core does not know Litestar)."""

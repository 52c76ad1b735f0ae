"""Which slice of the model a process holds.

Contract: a value, never a global; layers get it in their constructor and size their parameters by it. At world size 1
every layer is plain. Communication is not here: the executor that starts several ranks brings it.
"""

from dataclasses import dataclass

from mini_infer.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """A rank among those that share one model.

    Attributes:
        rank: this process's place, from 0.
        world_size: how many processes share the model.
    """

    rank: int = 0
    world_size: int = 1

    def share(self, total: int, what: str) -> int:
        """One rank's part of ``total``.

        Raises:
            ConfigError: ``total`` cannot be split evenly; ``what`` says of what.
        """
        if total % self.world_size:
            raise ConfigError(f"{what} ({total}) cannot be split over {self.world_size} ranks")
        return total // self.world_size


SINGLE = ParallelContext()

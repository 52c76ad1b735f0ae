"""Computed blocks kept and shared by content: see the README beside this file. Importing it imports nothing heavy."""

from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from mini_infer.plugins import hookimpl

if TYPE_CHECKING:
    from mini_infer.build_context import BuildContext
    from mini_infer.interfaces import CachePolicy

name = "prefix-cache"
api_version = 0
provides = ("prefix-cache",)


class Settings(BaseModel):
    """The table ``[plugin.prefix-cache]``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    eviction: Literal["lru", "lfu", "slru", "cost"] = Field(
        default="lru",
        description="which blocks go when room is wanted: unused for longest; least often hit, ageing; unused for "
        "longest of those that were never hit, then of the others; fewest hits, weighted by how long ago the last was",
    )
    half_life: PositiveInt = Field(
        default=4096,
        description='with eviction = "cost": a hit counts half as much once so many more blocks have been cached',
    )
    protected: float = Field(
        default=0.8,
        ge=0,
        le=1,
        description='with eviction = "slru": largest share of the cached blocks that is protected for having been hit',
    )


@hookimpl
def cache_policy(context: "BuildContext") -> "CachePolicy":
    from mini_infer_plugins.prefix_cache.eviction import LeastFrequent, LeastRecent, LeastWorth, Segmented
    from mini_infer_plugins.prefix_cache.policy import PrefixCache

    settings = context.settings_of(name, Settings)
    match settings.eviction:
        case "lru":
            return PrefixCache(LeastRecent())
        case "lfu":
            return PrefixCache(LeastFrequent())
        case "slru":
            return PrefixCache(Segmented(settings.protected))
        case "cost":
            return PrefixCache(LeastWorth(settings.half_life))

"""What a plugin module imports from the engine besides the interfaces.

A plugin is a module with ``name``, ``api_version`` and hook implementations marked with ``hookimpl``:

    from mini_infer.plugins import hookimpl

    name = "my-scheduler"
    api_version = 0

    @hookimpl
    def scheduler(context):
        from my_package.scheduler import MyScheduler
        return MyScheduler()

Contract: importing this module imports nothing but pluggy.
"""

import pluggy

__all__ = ["hookimpl"]

hookimpl = pluggy.HookimplMarker("mini_infer")

"""The engines that can be measured: each module has ``run(workload, repeats) -> list of seconds``.

``seconds`` are one entry a repeat: for ``decode`` the time a token, for ``batch`` the time for all requests.
"""

from collections.abc import Callable

from benchmarks.workloads import Workload

Run = Callable[[Workload, int], list[float]]


def find(name: str) -> Run:
    """The engine of that name.

    Raises:
        SystemExit: there is none.
    """
    if name == "mini-infer":
        from benchmarks.engines.ours import run
    elif name == "transformers":
        from benchmarks.engines.hf_generate import run
    elif name == "transformers-batch":
        from benchmarks.engines.hf_continuous import run
    elif name == "vllm":
        from benchmarks.engines.vllm_offline import run
    else:
        raise SystemExit(f"no engine {name!r}; there are mini-infer, transformers, transformers-batch, vllm")
    return run

"""Contract suites: what an implementation of each first-rank interface must keep, as tests that take one line.

::

    # tests/test_mine.py
    from mini_infer.testing.contracts import scheduler_suite
    from mine import MyScheduler

    TestMyScheduler = scheduler_suite(MyScheduler)

Each function returns a class of tests, which pytest collects under a name that begins with ``Test``. What goes in is a
class, or anything else that makes a fresh object when called without arguments. The suites check what the docstrings
of ``mini_infer.interfaces`` promise, with seeded random cases, on a CPU unless told otherwise, without any download;
they pass for the core's own implementations.
"""

from mini_infer.testing.contracts.attention import attention_backend_suite
from mini_infer.testing.contracts.cache_policy import cache_policy_suite
from mini_infer.testing.contracts.model_adapter import model_adapter_suite
from mini_infer.testing.contracts.sampler import sampler_suite
from mini_infer.testing.contracts.scheduler import scheduler_suite

__all__ = [
    "attention_backend_suite",
    "cache_policy_suite",
    "model_adapter_suite",
    "sampler_suite",
    "scheduler_suite",
]

"""``cpu-attention`` keeps the contract that third parties are held to, native code and plain PyTorch alike."""

from types import SimpleNamespace

import pytest

from mini_infer.interfaces import KVCacheSpec
from mini_infer.testing.contracts import attention_backend_suite
from mini_infer_plugins.cpu_attention.native import native_build
from mini_infer_plugins.cpu_attention.paged_attention import CpuAttention


class PlainOnly(CpuAttention):
    """As before its native code is built, and wherever there is no compiler."""

    def __init__(self, spec: KVCacheSpec, device: str, block_size: int) -> None:
        super().__init__(spec, device, block_size)
        self._build = SimpleNamespace(library=None)


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    native_build().start()
    native_build().wait()


TestCpuAttention = attention_backend_suite(CpuAttention)
TestPlainOnly = attention_backend_suite(PlainOnly)

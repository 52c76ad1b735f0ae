"""The native file is built before any of these tests, or they are skipped."""

import pytest

from mini_infer_plugins.cpu_kernels.native import native_build


@pytest.fixture(autouse=True)
def built() -> None:
    build = native_build()
    build.start()
    build.wait()
    if build.failed:
        pytest.skip(build.status)

"""native.cpp as seen from Python: its functions, and the one build of it that a process shares."""

import ctypes
from functools import cache
from pathlib import Path

from mini_infer.native_build import NativeBuild

_FOLDER = Path(__file__).parent


def _declare(library: ctypes.CDLL) -> None:
    pointer, number, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.linear.argtypes = (flag, pointer, pointer, pointer, pointer, number, number, number, flag)
    library.add_rms_norm.argtypes = (
        flag,
        *(pointer, pointer, pointer, pointer, pointer),
        *(number, number, ctypes.c_float, flag),
    )
    library.silu_and_mul.argtypes = (flag, pointer, pointer, number, number, flag)
    for function in (library.linear, library.add_rms_norm, library.silu_and_mul):
        function.restype = None


@cache
def native_build() -> NativeBuild:
    """The build of this plugin's file; the same for every engine of the process, for it holds no state of theirs."""
    return NativeBuild("cpu-kernels", _FOLDER / "native.cpp", [_FOLDER.parent / "vector_lanes.h"], _declare)


@cache
def multiplies_bfloat16() -> bool:
    """Whether the CPU has units for bfloat16 products (AMX, AVX-512 BF16, Arm's BF16), which PyTorch uses."""
    info = Path("/proc/cpuinfo")
    words = set(info.read_text().split()) if info.exists() else set()
    return bool(words & {"amx_bf16", "avx512_bf16", "bf16"})

"""native.cpp as seen from Python: its functions, and the one build of it that a process shares."""

import ctypes
from functools import cache
from pathlib import Path

from mini_infer.native_build import NativeBuild

_FOLDER = Path(__file__).parent


class MatrixArgs(ctypes.Structure):
    """``Matrix`` of native.cpp."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("blocks", ctypes.c_void_p),
        ("outs", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("bits", ctypes.c_int64),
    )


class DecoderLayerArgs(ctypes.Structure):
    """``DecoderLayer`` of native.cpp."""

    _fields_ = (
        ("qkv", MatrixArgs),
        ("o", MatrixArgs),
        ("gate_up", MatrixArgs),
        ("down", MatrixArgs),
        ("input_norm", ctypes.c_void_p),
        ("post_norm", ctypes.c_void_p),
        ("input_eps", ctypes.c_double),
        ("post_eps", ctypes.c_double),
        ("is_bf16", ctypes.c_int64),
    )


def _declare(library: ctypes.CDLL) -> None:
    pointer, number, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.linear.argtypes = (pointer, flag, pointer, pointer, number, flag)
    library.pack.argtypes = (flag, pointer, number, pointer, flag)
    library.pack.restype = flag
    library.block_bytes.argtypes = (flag,)
    library.block_bytes.restype = number
    library.add_rms_norm.argtypes = (
        flag,
        *(pointer, pointer, pointer, pointer, pointer),
        *(number, number, ctypes.c_float, flag),
    )
    library.silu_and_mul.argtypes = (flag, pointer, pointer, number, number, flag)
    halves = (pointer, pointer, pointer, pointer, pointer, number, flag)
    library.before_attention.argtypes = library.after_attention.argtypes = halves
    for name in ("linear", "add_rms_norm", "silu_and_mul", "before_attention", "after_attention"):
        getattr(library, name).restype = None


@cache
def native_build() -> NativeBuild:
    """The build of this plugin's file; the same for every engine of the process, for it holds no state of theirs."""
    return NativeBuild(
        "cpu-kernels", _FOLDER / "native.cpp", [_FOLDER / "blocks.h", _FOLDER.parent / "vector_lanes.h"], _declare
    )

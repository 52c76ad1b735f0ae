"""native.cpp as seen from Python: its structures, its functions, and the one build of it that a process shares."""

import ctypes
from functools import cache
from pathlib import Path

from mini_infer.native_build import NativeBuild

_FOLDER = Path(__file__).parent


class LayerArgs(ctypes.Structure):
    """``Layer`` of native.cpp."""

    _fields_ = (
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("rope", ctypes.c_void_p),
        ("is_bf16", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_double),
    )


class BatchArgs(ctypes.Structure):
    """``Batch`` of native.cpp."""

    _fields_ = (
        ("slot_mapping", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("cu_seqlens_q", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("num_rows", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
        ("longest", ctypes.c_int64),
        ("threads", ctypes.c_int64),
    )


def _declare(library: ctypes.CDLL) -> None:
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.write_kv.argtypes = (pointer, pointer, pointer, number, pointer, number)
    library.write_kv.restype = None
    library.attend.argtypes = (pointer, pointer, pointer, number, pointer)
    library.attend.restype = None


@cache
def native_build() -> NativeBuild:
    """The build of this plugin's file; the same for every engine of the process, for it holds no state of theirs."""
    return NativeBuild("cpu-attention", _FOLDER / "native.cpp", [_FOLDER.parent / "vector_lanes.h"], _declare)

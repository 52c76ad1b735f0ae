"""Messages on a stream socket: a length of four bytes, little-endian, then the message in MessagePack.

Contract: only msgspec types pass, never a pickle; a frame longer than ``MAX_FRAME_BYTES`` is an error.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from mini_infer.errors import EngineError

MAX_FRAME_BYTES = 2**30

M = TypeVar("M")

_encoder = msgspec.msgpack.Encoder()


def frame(message: msgspec.Struct) -> bytes:
    """A message as it goes over the wire."""
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "little") + body


class FrameReader(Generic[M]):
    """Cuts a byte stream into messages.

    Args:
        kind: the messages expected, a (union of) tagged msgspec structs.
    """

    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[M]:
        """The messages that ``data`` completes.

        Raises:
            EngineError: not such messages: the other side is broken.
        """
        self._buffer += data
        messages: list[M] = []
        start = 0
        view = memoryview(self._buffer)
        try:
            while len(view) - start >= 4:
                length = int.from_bytes(view[start : start + 4], "little")
                if length > MAX_FRAME_BYTES:
                    raise EngineError(f"a message of {length} bytes is not one of ours")
                if len(view) - start - 4 < length:
                    break
                messages.append(self._decoder.decode(view[start + 4 : start + 4 + length]))
                start += 4 + length
        except msgspec.MsgspecError as error:
            raise EngineError(f"a message could not be read: {error}") from error
        finally:
            view.release()
        del self._buffer[:start]
        return messages

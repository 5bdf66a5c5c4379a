"""Frames on a pipe: four bytes of length (big endian), then the body."""

from __future__ import annotations

import os
import struct

_LENGTH = struct.Struct(">I")
MAX_VERDICT_BYTES = 4096
"""Longest verdict a judge may send: at most PIPE_BUF, so that a write is never torn."""
MAX_REPLY_BYTES = 1 << 16
"""Longest frame the trainer accepts from a worker."""
MAX_REQUEST_BYTES = 1 << 30
"""Longest frame a worker accepts from the trainer."""
_READ_BYTES = 1 << 18


class BadFrame(Exception):
    """The other side does not keep to the protocol."""


def frame(body: bytes) -> bytes:
    """A body with its length in front."""
    return _LENGTH.pack(len(body)) + body


def send(fd: int, body: bytes) -> None:
    """Write one frame to a blocking descriptor."""
    rest = memoryview(frame(body))
    while rest:
        rest = rest[os.write(fd, rest) :]


class Reader:
    """Cuts what arrives on a descriptor into frames. Never holds more than one frame's limit plus one read."""

    def __init__(self, fd: int, limit: int) -> None:
        self.fd = fd
        self.limit = limit
        self._buffer = bytearray()

    def pull(self) -> bool:
        """Read what is there (blocks if the descriptor does and nothing is); False at the end of the stream."""
        chunk = os.read(self.fd, _READ_BYTES)
        self._buffer += chunk
        return bool(chunk)

    def frames(self) -> list[bytes]:
        """The complete frames received so far.

        Raises:
            BadFrame: a length beyond the limit.
        """
        found: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer, start)
            if size > self.limit:
                raise BadFrame(f"a frame of {size} bytes, at most {self.limit} are allowed")
            end = start + _LENGTH.size + size
            if len(self._buffer) < end:
                break
            found.append(bytes(self._buffer[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return found

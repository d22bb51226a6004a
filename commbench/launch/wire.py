"""Frames of the control plane: a JSON header, and bytes that need no text.

Layout: 4 bytes header length, 4 bytes blob length (big-endian), header (UTF-8 JSON object), blob.
Standard library only: every rank loads this before anything else.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

_LENGTHS = struct.Struct("!II")
MAX_HEADER = 64 << 20
MAX_BLOB = 512 << 20
# A stranger may connect to the port: until the token has been checked nothing larger is read.
MAX_HELLO = 64 << 10


class WireError(ConnectionError):
    """The other end is gone or does not speak this protocol."""


def pack(header: dict[str, Any], blob: bytes = b"") -> bytes:
    """One frame, ready for ``sendall``."""
    text = json.dumps(header, separators=(",", ":")).encode()
    return _LENGTHS.pack(len(text), len(blob)) + text + blob


class Reader:
    """Cuts a byte stream into frames; feed it what ``recv`` returned."""

    def __init__(self, *, max_header: int = MAX_HELLO, max_blob: int = 0) -> None:
        self._buffer = bytearray()
        self.max_header = max_header
        self.max_blob = max_blob

    def trust(self) -> None:
        """Lift the limits that hold for a peer whose token has not been checked."""
        self.max_header, self.max_blob = MAX_HEADER, MAX_BLOB

    def feed(self, data: bytes) -> list[tuple[dict[str, Any], bytes]]:
        """The frames completed by ``data``. Raises WireError on anything that is not a frame."""
        self._buffer += data
        frames = []
        while len(self._buffer) >= _LENGTHS.size:
            text_length, blob_length = _LENGTHS.unpack_from(self._buffer)
            if text_length > self.max_header or blob_length > self.max_blob:
                raise WireError("a peer sent something that is not commbench's protocol")
            end = _LENGTHS.size + text_length + blob_length
            if len(self._buffer) < end:
                break
            frames.append((self._header(text_length), bytes(self._buffer[_LENGTHS.size + text_length : end])))
            del self._buffer[:end]
        return frames

    def _header(self, length: int) -> dict[str, Any]:
        try:
            header = json.loads(self._buffer[_LENGTHS.size : _LENGTHS.size + length])
        except ValueError:
            header = None
        if not isinstance(header, dict):
            raise WireError("a peer sent something that is not commbench's protocol")
        return header


def make_silent(connection: socket.socket) -> None:
    """Small frames at once, and a dead host noticed by keep-alive within about 15 s."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

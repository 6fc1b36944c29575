"""NIXL, and what clients and server of the store say to each other besides the bytes of objects.

A message is 4 bytes of length, little-endian, and JSON. The client asks, the server answers.
"""

from __future__ import annotations

import json
import socket
import struct
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def nixl_api() -> Any:
    """NIXL's module of agents: of the one package for some CUDA, or none, that is installed, or of
    its front, which may have to import torch to choose among several.

    Raises:
        ImportError: it is not installed.
    """
    found = [name for name in ("nixl_cu12", "nixl_cu13", "nixl_rocm") if find_spec(name)]
    return import_module(f"{found[0] if len(found) == 1 else 'nixl'}._api")


_LENGTH = struct.Struct("<I")
MOST_BYTES = 64 * 2**20


def send(to: socket.socket, message: dict[str, Any]) -> None:
    """Send a message.

    Raises:
        OSError: as of the socket.
    """
    data = json.dumps(message).encode()
    to.sendall(_LENGTH.pack(len(data)) + data)


def receive(of: socket.socket) -> dict[str, Any]:
    """The next message.

    Raises:
        ConnectionError: the other end is gone, or says something else.
        OSError: as of the socket.
    """
    (length,) = _LENGTH.unpack(_exactly(of, _LENGTH.size))
    if length > MOST_BYTES:
        raise ConnectionError(f"expected at most {MOST_BYTES} bytes, got {length}")
    try:
        message = json.loads(_exactly(of, length))
    except ValueError as error:
        raise ConnectionError(f"expected JSON, got {error}") from error
    if not isinstance(message, dict):
        raise ConnectionError(f"expected an object, got {message!r:.99}")
    return message


def _exactly(of: socket.socket, n: int) -> bytes:
    parts = []
    while n:
        part = of.recv(min(n, 1 << 20))
        if not part:
            raise ConnectionError("the other end has closed the connection")
        parts.append(part)
        n -= len(part)
    return b"".join(parts)

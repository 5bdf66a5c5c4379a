"""Whether an address is this machine's, and the key that servers and trainers share."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path


def is_this_machine(host: str) -> bool:
    """Whether a host name or address is one of this machine's: only those can be bound."""
    for family, kind, protocol, address in _addresses(host):
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind((address[0], 0, *address[2:]))
            except OSError:
                continue
            return True
    return False


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens there."""
    addresses = [str(address[0]) for *_, address in _addresses(host)]
    return bool(addresses) and all(ipaddress.ip_address(a.partition("%")[0]).is_loopback for a in addresses)


def _addresses(host: str) -> list[tuple[socket.AddressFamily, socket.SocketKind, int, tuple]]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except OSError:
        return []
    return [(family, kind, protocol, address) for family, kind, protocol, _, address in found]


def read_api_key(path: str | None) -> str | None:
    """The key in a file, None without a file. Raises ValueError when it cannot be read or is no key."""
    if path is None:
        return None
    try:
        key = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"rollout.vllm.api_key_file {path} cannot be read: {error}") from None
    if not key or any(c.isspace() for c in key) or not key.isascii():
        raise ValueError(f"rollout.vllm.api_key_file {path} must hold one word in ASCII, the key")
    return key

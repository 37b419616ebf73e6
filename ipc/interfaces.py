"""Network interfaces of this host and their addresses, from the kernel: sockets without keys are bound to one of them.

Used where `--interface` is checked (enginecore/hosts/), before workers get the result. Standard library only.
"""

import fcntl
import ipaddress
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_SIOCGIFADDR = 0x8915
_IF_INET6 = Path("/proc/net/if_inet6")


class Interface(NamedTuple):
    """A network interface, and the one of its addresses that sockets are bound to."""

    name: str
    address: str


LOOPBACK = Interface("lo", "127.0.0.1")


def find_interface(name_or_address: str) -> Interface:
    """The interface of this name or with this address. Raises ValueError, which lists the interfaces of this host."""
    names = {name: _addresses(name) for _, name in socket.if_nameindex()}
    if names.get(name_or_address):
        return Interface(name_or_address, names[name_or_address][0])
    with suppress(ValueError):
        address = ipaddress.ip_address(name_or_address)
        if address.version == 4 and address.is_loopback:  # all of 127.0.0.0/8 can be bound, and is not listed
            return Interface(LOOPBACK.name, name_or_address)
        for name, addresses in names.items():
            if str(address) in addresses:
                return Interface(name, str(address))
    there = ", ".join(f"{name} ({', '.join(addresses)})" for name, addresses in names.items() if addresses)
    raise ValueError(f"--interface {name_or_address}: no network interface here has this name or address; there are {there}")


def _addresses(name: str) -> list[str]:
    """Its addresses, IPv4 first. A user may choose an interface by any of them; sockets are bound to the first."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        found.append(socket.inet_ntoa(answer[20:24]))
    with suppress(OSError):
        for line in _IF_INET6.read_text().splitlines():
            digits, _, _, scope, _, owner = line.split()
            if owner == name and int(scope, 16) != 0x20:  # not link-local
                found.append(str(ipaddress.IPv6Address(int(digits, 16))))
    return found

"""Where media may be fetched from: a URL, parsed once and strictly, and the addresses that its host may have.

The address that is checked here is the one that fetch.py connects to: it gets a host, a port and a path from `parse`, resolves
the name once, asks `is_allowed` about each address, and dials one of those. So a URL that two parsers read differently, a name
that resolves anew, or an address in another notation gains nothing.
"""

import ipaddress
import re
from typing import NamedTuple

from quire.frontend.media.errors import MediaError
from quire.frontend.media.options import Domain

MAX_URL = 8192
_URL = re.compile(r"(https?)://([A-Za-z0-9._-]+)(?::([0-9]{1,5}))?(/[^\s#\\]*)?(?:#.*)?", re.ASCII)
_TARGET = re.compile(r"[!-~]*", re.ASCII)  # of an HTTP request: visible ASCII
# Beyond what `is_global` refuses: addresses that stand for others, or that are not a single host's.
_NEVER = tuple(
    ipaddress.ip_network(text)
    for text in ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32", "::ffff:0:0/96", "::/96", "fec0::/10",
                 "100.64.0.0/10", "192.88.99.0/24")
)  # fmt: skip

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Url(NamedTuple):
    is_tls: bool
    host: str
    port: int
    target: str
    domain: Domain

    @property
    def authority(self) -> str:
        return self.host if self.port == (443 if self.is_tls else 80) else f"{self.host}:{self.port}"


def parse(url: str, domains: tuple[Domain, ...]) -> Url:
    """Raises MediaError for what is no URL, and for a host that is not among the domains."""
    match = _URL.fullmatch(url) if len(url) <= MAX_URL else None
    if match is None or not _TARGET.fullmatch(target := (match[4] or "/")):
        raise MediaError("the address must be like https://example.org/image.png, without a user, spaces or backslashes")
    is_tls, host = match[1] == "https", match[2].lower().rstrip(".")
    port = int(match[3]) if match[3] else (443 if is_tls else 80)
    for domain in domains:
        if domain.host == host and (port == domain.port or (domain.port is None and port in (80, 443))):
            return Url(is_tls, host, port, target, domain)
    raise MediaError(
        "this server does not fetch media from this host (see --allowed-media-domains); send the image itself as a data: URL",
        code="media_not_allowed",
    )


def is_allowed(text: str, domain: Domain) -> bool:
    """Whether an address, as the resolver gives it, may be dialed for a domain."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
        if domain.network is not None:
            return address in ipaddress.ip_network(domain.network)
    except ValueError:
        return False
    if address.is_multicast or address.is_loopback or address.is_link_local or address.is_private or address.is_unspecified:
        return False
    if address.is_reserved or not address.is_global:
        return False
    return not any(address.version == network.version and address in network for network in _NEVER)

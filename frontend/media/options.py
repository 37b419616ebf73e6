"""MediaOptions: the operator's choices for media, as one frontend process has them. frontend/cli/media_flags.py makes them."""

import ipaddress
from typing import Any

import msgspec

from quire.ipc.media import MAX_HELD_MEDIA_BYTES, MAX_IMAGES


class MediaOptions(msgspec.Struct, frozen=True, kw_only=True):
    """limits: most items of a prompt by kind. domains: as of --allowed-media-domains. local_path: a folder, or "" for none.

    num_children: of this process. cache_bytes: of tensors. processor_options: for the checkpoint's processor.
    """

    limits: dict[str, int] = {}
    domains: tuple[str, ...] = ()
    local_path: str = ""
    num_children: int = 1
    cache_bytes: int = 4 << 30
    processor_options: dict[str, Any] = {}
    max_body_bytes: int = 64 << 20  # of a request where the model takes media
    trusts_requests: bool = False  # with settings of the processor: mm_processor_kwargs
    max_held_bytes: int = MAX_HELD_MEDIA_BYTES  # sources of all running requests

    @property
    def max_images(self) -> int:
        return self.limits.get("image", MAX_IMAGES)


NO_MEDIA_OPTIONS = MediaOptions()


class Domain(msgspec.Struct, frozen=True):
    """A host that may be fetched from. port: None for 80 and 443. network: where its addresses are private."""

    host: str
    port: int | None = None
    network: str | None = None


def parse_domain(text: str) -> Domain:
    """HOST, HOST:PORT or HOST=CIDR, HOST:PORT=CIDR. Raises ValueError."""
    name, _, network = text.partition("=")
    host, colon, port = name.strip().lower().partition(":")
    if not host or set(host) - set("abcdefghijklmnopqrstuvwxyz0123456789-._"):
        raise ValueError(f"{text!r} is no host name: hosts are like example.org, example.org:8443 or store=10.0.0.0/8")
    if colon and not (port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError(f"{text!r} has no port between 1 and 65535 behind its colon")
    if network:
        ipaddress.ip_network(network.strip())
    return Domain(host.rstrip("."), int(port) if colon else None, network.strip() or None)

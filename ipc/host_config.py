"""HostConfig: the configuration of a host's agent, and the flags of `quire host` that set it."""

import argparse

import msgspec

from quire.ipc.log_flags import LOG_LEVELS
from quire.ipc.process.flags import one_of


class HostConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of an agent. Without key_file it makes keys of its own; admitted: public keys beside those of allow_file."""

    listen: str
    key_file: str | None = None
    allow_file: str | None = None
    admitted: list[str] = []
    interface: str | None = None
    log_level: str = "info"
    log_format: str = "text"


def add_host_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `quire host`."""
    parser.add_argument(
        "--listen",
        metavar="ADDRESS",
        help="address at which engines reach this host: tcp://ADDRESS:PORT, on a private network; port * picks a free one",
    )
    parser.add_argument(
        "--key-file",
        metavar="FILE",
        help="this host's key pair, readable by its owner only; made if it does not exist",
    )
    parser.add_argument("--allow-file", metavar="FILE", help="public keys of the engines that may use this host, one a line")
    parser.add_argument(
        "--interface",
        metavar="NAME",
        help="network interface, or its address, to which the sockets of NCCL and gloo on this host are bound (default: the "
        "engine's --interface)",
    )
    parser.add_argument(
        "--generate-keys",
        metavar="FILE",
        help="write a new key pair into FILE, print its public key, and end; an engine's --hosts-key-file needs a pair, too",
    )
    parser.add_argument(
        "--log-level",
        type=one_of(LOG_LEVELS, {"trace": "debug"}),
        default="info",
        metavar="LEVEL",
        help="critical, error, warning, info or debug (default: info)",
    )
    parser.add_argument("--log-format", choices=["text", "json"], default="text", help="json: an object a line (default: text)")

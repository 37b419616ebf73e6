"""Flags of `quire serve` for the server itself: TLS, a unix socket, a root path, shutdown, limits of answers.

Names are vLLM's where it has the flag. `add_server_flags` and `add_tls_flags` add them to groups of the command;
`server_options` checks them and converts them for FrontendConfig and ServeConfig.
"""

import argparse
from typing import TYPE_CHECKING, Any

from quire.frontend.cli.media_flags import media_options
from quire.ipc.process.command import CommandParser
from quire.ipc.process.flags import Switch

if TYPE_CHECKING:
    from quire.frontend.http.limits.key_limits import KeyLimits
    from quire.frontend.http.tls import TlsFiles

_MOST_RESPONSE_MIB = 4096


def add_server_flags(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add("--uds", metavar="PATH", help="listen at a unix socket instead of a port (default: none)")
    add("--uds-mode", type=_mode, default=0o660, metavar="MODE", help="permissions of that socket, as for chmod (default: 660)")
    add(
        "--root-path",
        type=_root_path,
        default="",
        metavar="PATH",
        help="prefix that a proxy puts before every path; paths are served with it and without it (default: none)",
    )
    add(
        "--drain-delay-s",
        type=float,
        default=0.0,
        metavar="S",
        help="seconds between a stop, when /ready turns 503, and the end of new connections: the time in which a balancer "
        "notices it (default: %(default)s)",
    )
    add(
        "--max-response-mib",
        type=int,
        default=128,
        help="the longest answer that is not a stream, MiB; it is never held as a whole (default: %(default)s)",
    )


def add_tls_flags(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add("--ssl-certfile", metavar="FILE", help="speak TLS with this certificate chain, PEM (default: plain HTTP)")
    add("--ssl-keyfile", metavar="FILE", help="the key, PEM, without a password (default: in the certificate's file)")
    add("--ssl-ca-certs", metavar="FILE", help="authorities that may have issued clients' certificates, PEM (default: none)")
    add(
        "--ssl-cert-reqs",
        type=int,
        choices=(0, 1, 2),
        default=0,
        help="clients' certificates: 0 none, 1 checked if there is one, 2 required (default: %(default)s)",
    )
    add("--ssl-ciphers", metavar="LIST", help="cipher suites of TLS 1.2, as OpenSSL writes them (default: Python's)")
    add(
        "--enable-ssl-refresh",
        action=Switch,
        default=False,
        help="read certificate files again when they change; open connections stay as they are (default: off)",
    )


def server_options(parser: CommandParser, args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of FrontendConfig and of ServeConfig. Ends the program for incompatible flags."""
    if not args.drain_delay_s >= 0:
        parser.error("--drain-delay-s must be at least 0")
    if not 1 <= args.max_response_mib <= _MOST_RESPONSE_MIB:
        parser.error(f"--max-response-mib must be between 1 and {_MOST_RESPONSE_MIB}")
    if args.uds == "":
        parser.error("--uds needs a path")
    if not 0 <= args.request_timeout_s < float("inf"):
        parser.error("--request-timeout-s must be at least 0 (0: no limit)")
    frontend = {
        "key_limits": _key_limits(parser, args.limits),
        "request_timeout_s": args.request_timeout_s,
        "tls": _tls(parser, args),
        "root_path": args.root_path,
        "drain_delay_s": args.drain_delay_s,
        "max_response_mib": args.max_response_mib,
        "media": media_options(parser, args),
    }
    return frontend, {"uds": args.uds, "uds_mode": args.uds_mode}


def _key_limits(parser: CommandParser, path: str | None) -> "KeyLimits":
    from quire.frontend.http.limits.key_limits import KeyLimits

    if path is None:
        return KeyLimits()
    from quire.frontend.http.limits.limits_file import read_limits

    try:
        return read_limits(path)
    except ValueError as error:
        parser.error(str(error))


def _tls(parser: CommandParser, args: argparse.Namespace) -> "TlsFiles | None":
    if args.ssl_certfile is None:
        names = ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers", "enable_ssl_refresh")
        given = [f"--{name.replace('_', '-')}" for name in names if getattr(args, name)]
        if given:
            parser.error(f"{', '.join(given)}: TLS needs --ssl-certfile as well")
        return None
    from quire.frontend.http.tls import TlsFiles

    return TlsFiles(
        certfile=args.ssl_certfile,
        keyfile=args.ssl_keyfile,
        ca_certs=args.ssl_ca_certs,
        cert_reqs=args.ssl_cert_reqs,
        ciphers=args.ssl_ciphers,
        refresh=args.enable_ssl_refresh,
    )


def _mode(text: str) -> int:
    try:
        mode = int(text, 8)
    except ValueError:
        mode = -1
    if not 0 < mode <= 0o777:
        raise argparse.ArgumentTypeError("a mode is three octal digits, as 660")
    return mode


def _root_path(text: str) -> str:
    path = text.rstrip("/")
    if path and (not path.startswith("/") or not path.isascii() or not path.isprintable() or set(path) & set(" ?#")):
        raise argparse.ArgumentTypeError("a root path begins with a slash, as /llm")
    return path

"""The flags of `quire serve`, by purpose: the server's here, the engine's in ipc/config.py. It needs only argparse."""

import argparse
import json
import re
from typing import Any

from quire.frontend.cli.help_topics import HelpTopics
from quire.frontend.cli.media_flags import add_media_flags
from quire.frontend.cli.parser_arguments import add_parser_arguments
from quire.frontend.cli.server_flags import add_server_flags, add_tls_flags
from quire.ipc.config import add_engine_arguments, add_log_arguments
from quire.ipc.process.command import CommandParser
from quire.ipc.process.flags import JsonObject, Switch, human_int

_HOST = re.compile(r"\*\.?|(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?")
ROUTERS = ("cache-aware", "least-loaded", "round-robin")  # repeated from router.py, which needs numpy


def add_serve_arguments(serve: CommandParser) -> None:
    serve.add_argument("-h", "--help", action=HelpTopics, help="this help; =listgroup, =GROUP or =FLAG for less of it")
    serve.add_argument("--model", dest="model_flag", metavar="MODEL", help="the same as MODEL without the flag (default: none)")
    serve.add_argument(
        "--config",
        metavar="FILE",
        help="a YAML file of flags, like `port: 8000`; flags on the command line take precedence (default: none)",
    )
    server = serve.add_argument_group("server")
    add_frontend_arguments(serve, server)
    attach = serve.add_argument_group("running engines", "attach to `enginecore` daemons instead of starting engines")
    attach.add_argument(
        "--engine",
        nargs="+",
        metavar="ADDRESS",
        help="addresses of running engines of one model: ipc:///path or tcp://host:port (default: start an engine)",
    )
    _add_keys(attach)
    add_engine_arguments(serve)
    serve.add_argument(
        "--profiler-config",
        action=JsonObject,
        default={},
        metavar="JSON",
        help='vLLM\'s way to say --profile-dir: {"profiler": "torch", "torch_profiler_dir": "FOLDER"} (default: none)',
    )


def add_route_arguments(route: CommandParser) -> None:
    """The flags of `quire route`: those of `quire serve` without the engine's."""
    route.add_argument("-h", "--help", action=HelpTopics, help="this help; =listgroup, =GROUP or =FLAG for less of it")
    route.add_argument("engine", nargs="*", metavar="ADDRESS", help="engines of one model: ipc:///path or tcp://host:port")
    route.add_argument("--engine", dest="engines", nargs="+", default=[], metavar="ADDRESS", help="the same as in quire serve")
    route.add_argument(
        "--config",
        metavar="FILE",
        help="a YAML file of flags, like `port: 8000`; flags on the command line take precedence (default: none)",
    )
    add_frontend_arguments(route, route.add_argument_group("server"))
    _add_keys(route.add_argument_group("keys of engines"))
    add_log_arguments(route)


def add_frontend_arguments(parser: CommandParser, server: "argparse._ArgumentGroup") -> None:
    """The flags that do not depend on who starts the engines."""
    _add_server(server)
    add_server_flags(server)
    add_tls_flags(parser.add_argument_group("TLS"))
    _add_access(parser.add_argument_group("access"))
    _add_files(parser.add_argument_group("files and batches"))
    _add_requests(parser.add_argument_group("requests"))
    add_media_flags(parser.add_argument_group("images of requests"))
    add_parser_arguments(parser)
    _add_router(parser.add_argument_group("several engines"))
    _add_traces(parser.add_argument_group("access log and traces"))


def _add_server(add_to: Any) -> None:
    add = add_to.add_argument
    add("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0 for all (default: %(default)s)")
    add("--port", type=_port, default=8000, help="port to listen at; 0 for any free one (default: %(default)s)")
    add(
        "--frontends",
        "--api-server-count",
        "-asc",
        type=int,
        default=1,
        metavar="N",
        help="HTTP processes that share the port (default: 1)",
    )
    add("--max-connections", type=int, default=8192, help="the most open connections of an HTTP process (default: %(default)s)")
    add("--max-body-mib", type=int, default=8, help="the largest request body, MiB (default: %(default)s)")
    add("--h11-max-header-count", type=int, default=100, metavar="N", help="most headers of a request (default: %(default)s)")
    add(
        "--h11-max-incomplete-event-size",
        type=human_int,
        default=32 << 10,
        metavar="BYTES",
        help="the largest head of a request, in bytes (default: %(default)s)",
    )
    add("--keep-alive-timeout-s", type=float, default=75.0, help="seconds an idle connection stays open (default: %(default)s)")
    add(
        "--shutdown-grace-s",
        "--shutdown-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds that running requests have to end at a stop (default: %(default)s)",
    )


def _add_access(add_to: Any) -> None:
    add = add_to.add_argument
    add(
        "--api-key",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY",
        help="keys; a client must send one of them, as 'Authorization: Bearer KEY' or 'x-api-key: KEY'; repeatable (default: "
        "VLLM_API_KEY of the environment, or none)",
    )
    add("--api-key-file", metavar="FILE", help="a file of such keys, one a line, which no process list shows (default: none)")
    add(
        "--admin-api-key",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY",
        help="keys that the routes for the operator need: /metrics, /server_info, /reset_prefix_cache and profiles; such a key "
        "opens all other routes, too (default: none, these routes answer to any key)",
    )
    add("--admin-api-key-file", metavar="FILE", help="a file of such keys, one a line (default: none)")
    add(
        "--allowed-hosts",
        type=_hosts,
        default=None,
        metavar="LIST",
        help='names that clients may call this server by: a JSON list, or with commas; "*.example.org" stands for all names '
        "below one, * for all; IP addresses are always allowed (default: without keys on a loopback address localhost, "
        "*.localhost and names without a dot, else all)",
    )
    add(
        "--limits",
        metavar="FILE",
        help="a YAML file of what each API key may have: requests, tokens a minute, its share; docs/limits.md (default: none)",
    )
    add("--metrics-open", action=Switch, default=False, help="allow /metrics without a key (default: off)")
    add("--disable-fastapi-docs", action=Switch, default=False, help="answer 404 at /docs and /openapi.json (default: off)")
    _add_origins(add_to)


def _add_origins(add_to: Any) -> None:
    add = add_to.add_argument
    add(
        "--allowed-origins",
        type=_names,
        default=("*",),
        metavar="LIST",
        help='origins of web pages that may use the server: a JSON list, or with commas (default: ["*"], all)',
    )
    add(
        "--allowed-methods",
        type=_names,
        default=("*",),
        metavar="LIST",
        help='methods that such pages may use (default: ["*"], all)',
    )
    add(
        "--allowed-headers",
        type=_names,
        default=("*",),
        metavar="LIST",
        help='headers that such pages may send (default: ["*"], all)',
    )
    add(
        "--allow-credentials",
        action=Switch,
        default=False,
        help="allow such pages to send credentials, like cookies for a proxy before the server (default: off)",
    )


def _add_files(add_to: Any) -> None:
    add = add_to.add_argument
    add(
        "--files-dir",
        metavar="FOLDER",
        help="folder on a local disk for files, batches and stored responses (default: a private folder that is removed with"
        " the server)",
    )
    add("--max-files-mib", type=int, default=4096, help="bound of files and batches together, MiB (default: %(default)s)")


def _add_requests(add_to: Any) -> None:
    add = add_to.add_argument
    add(
        "--trust-request-chat-template",
        action=Switch,
        default=False,
        help="allow requests to bring their own chat templates, which a separate process renders, each for at most 2 s "
        "(default: off, they get 400)",
    )
    add(
        "--request-timeout-s",
        type=float,
        default=0.0,
        metavar="S",
        help="the longest that a request may take, whatever its own timeout says; then it ends with 504; 0: no limit "
        "(default: %(default)s)",
    )
    add("--response-role", default="assistant", metavar="ROLE", help="role of chat answers (default: %(default)s)")
    add(
        "--default-chat-template-kwargs",
        action=JsonObject,
        default={},
        metavar="JSON",
        help='variables of the chat template that a request does not set, like {"enable_thinking": false} (default: none)',
    )
    add(
        "--return-tokens-as-token-ids",
        action=Switch,
        default=False,
        help="name tokens token_id:N in logprobs, unless a request says otherwise (default: off)",
    )
    add(
        "--enable-force-include-usage",
        action=Switch,
        default=False,
        help="send the usage in every event of a stream and at its end, whatever a request says (default: off)",
    )
    add(
        "--enable-request-id-headers",
        action=Switch,
        default=False,
        help="send X-Request-Id with every answer, not only if the request had one (default: off)",
    )


def _add_router(add_to: Any) -> None:
    add_to.add_argument(
        "--router",
        choices=ROUTERS,
        default=ROUTERS[0],
        help="which engine gets a request: cache-aware, the one that would have least to compute with it, among those that "
        "have cached the prompt's beginning and some others; least-loaded; or round-robin (default: %(default)s)",
    )


def _add_keys(add_to: Any) -> None:
    add = add_to.add_argument
    add(
        "--curve-key-file",
        metavar="FILE",
        help="file of this server's key pair, for engines with keys; it is made if it does not exist (default: none)",
    )
    add(
        "--curve-engine-key",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY",
        help="public key of an engine with keys; for several engines one key for all, or one each (default: none)",
    )


def _add_traces(add_to: Any) -> None:
    add = add_to.add_argument
    add(
        "--access-log",
        action=Switch,
        default=False,
        help="log a line for each HTTP request: client, method and path, status, seconds (default: off)",
    )
    add("--disable-uvicorn-access-log", action="store_false", dest="access_log", help="the same as --no-access-log")
    add("--no-disable-uvicorn-access-log", action="store_true", dest="access_log", help="the same as --access-log")
    add(
        "--disable-access-log-for-endpoints",
        type=_paths,
        default=(),
        metavar="PATHS",
        help="paths that the access log leaves out, with commas, like /health,/metrics (default: none)",
    )
    add(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send OpenTelemetry spans to this address over HTTP; needs the extra `otlp` (default: none)",
    )


# --------------------------------------------------------------------------------------------------------------- values
def _names(text: str) -> tuple[str, ...]:
    """A JSON list, as for vLLM, or names separated by commas."""
    try:
        names = json.loads(text) if text.lstrip().startswith("[") else [part.strip() for part in text.split(",")]
    except (ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise argparse.ArgumentTypeError("names are like a,b or a JSON list; origins are like https://example.org")
    return tuple(names)


def _hosts(text: str) -> tuple[str, ...]:
    names = _names(text)
    if wrong := [name for name in names if not _HOST.fullmatch(name)]:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r} is no host's name: names are like example.org, *.example.org or *")
    return names


def _paths(text: str) -> tuple[str, ...]:
    paths = tuple(part.strip() for part in text.split(",") if part.strip())
    if not all(path.startswith("/") for path in paths):
        raise argparse.ArgumentTypeError("paths begin with a slash and have commas between them")
    return paths


def _port(text: str) -> int:
    port = int(text) if text.isdecimal() else -1
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError("a port is between 0 and 65535")
    return port

"""`quire`: the command line. Only argparse is imported until a command needs more, so that --help and version are quick."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.frontend.cli.parser_arguments import add_parser_arguments
from quire.frontend.cli.run_batch import add_run_batch
from quire.frontend.cli.server_flags import add_server_flags, server_options
from quire.ipc.process.command import CommandParser, quiet_interrupts
from quire.ipc.version import VERSION

if TYPE_CHECKING:
    from quire.ipc.config import EngineConfig
    from quire.ipc.process.children import Child


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 1 failed, 2 wrong arguments, 130 interrupted while starting."""
    try:
        return _run(argv)
    except KeyboardInterrupt:  # before a command has its own way with it
        return 130


def _run(argv: Sequence[str] | None) -> int:
    parser = _parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:  # said by the command that does not know them: its help is the one to see
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if args.command is None:
        parser.print_help()
        return 2
    return args.run(args)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="quire", description="Quire serves large language models.")
    parser.add_argument("--version", action="version", version=f"quire {VERSION}")
    parser.set_defaults(parser=parser)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _add_serve(commands)
    _add_chat(commands)
    add_run_batch(commands)
    version = commands.add_parser("version", help="print the version")
    version.set_defaults(run=_version, parser=version)
    return parser


def _version(args: argparse.Namespace) -> int:
    print(f"quire {VERSION}")
    return 0


# ------------------------------------------------------------------------------------------------------------ quire serve
def _add_serve(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    serve = commands.add_parser(
        "serve",
        help="serve a model over an OpenAI-compatible HTTP API",
        description="Serve a model over an OpenAI-compatible HTTP API. Without a model, a tiny bundled one.",
        epilog="example: quire serve Qwen/Qwen3-0.6B --port 8000",
    )
    http = serve.add_argument_group("server")
    http.add_argument("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0 for all (default: %(default)s)")
    http.add_argument("--port", type=_port, default=8000, help="port to listen at; 0 for any free one (default: %(default)s)")
    http.add_argument(
        "--api-key", action="append", default=[], metavar="KEY", help="a key that clients must send; repeatable (default: none)"
    )
    http.add_argument(
        "--api-key-file", metavar="FILE", help="a file of such keys, one a line, which no process list shows (default: none)"
    )
    http.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send OpenTelemetry spans there, over HTTP; needs quire[otlp] (default: none)",
    )
    http.add_argument("--metrics-open", action="store_true", help="let /metrics be read without a key")
    http.add_argument(
        "--allowed-origins",
        type=_origins,
        default=("*",),
        metavar="LIST",
        help='origins of web pages that may use the server: a JSON list, or with commas (default: ["*"], all)',
    )
    http.add_argument(
        "--trust-request-chat-template",
        action="store_true",
        help="let requests bring chat templates of their own (default: they get 400)",
    )
    http.add_argument("--frontends", type=int, default=1, metavar="N", help="HTTP processes that share the port (default: 1)")
    http.add_argument("--max-connections", type=int, default=8192, help="per HTTP process (default: %(default)s)")
    http.add_argument("--max-body-mib", type=int, default=8, help="largest request body, MiB (default: %(default)s)")
    _add_files_arguments(http)
    http.add_argument("--keep-alive-timeout-s", type=float, default=75.0, help="for idle connections (default: %(default)s)")
    http.add_argument("--shutdown-grace-s", type=float, default=30.0, help="for running requests to end (default: %(default)s)")
    add_server_flags(http)
    add_parser_arguments(serve)
    attach = serve.add_argument_group("running engine", "attach to an `enginecore` daemon instead of starting an engine")
    attach.add_argument("--engine", metavar="ADDRESS", help="its address: ipc:///path or tcp://host:port (default: start one)")
    attach.add_argument(
        "--curve-key-file",
        metavar="FILE",
        help="this server's key pair, for an engine with keys; made if the file is not there (default: none)",
    )
    attach.add_argument(
        "--curve-engine-key", metavar="KEY", help="the engine's public key, for an engine with keys (default: none)"
    )
    serve.set_defaults(run=_serve, parser=serve)
    from quire.ipc.config import add_engine_arguments

    add_engine_arguments(serve)


def _add_files_arguments(http: argparse._ArgumentGroup) -> None:
    http.add_argument(
        "--files-dir",
        metavar="FOLDER",
        help="where files, batches and stored responses are kept, on a local disk (default: a private folder that goes with"
        " the server)",
    )
    http.add_argument("--max-files-mib", type=int, default=4096, help="files and batches together, MiB (default: %(default)s)")


def _serve(args: argparse.Namespace) -> int:
    from quire.ipc.config import engine_config_from
    from quire.ipc.links.paths import check_address

    parser: CommandParser = args.parser
    if not 1 <= args.frontends <= 64:
        parser.error("--frontends must be between 1 and 64")
    if args.engine is not None and (extra := _engine_options(parser, args)):
        parser.error(f"--engine attaches to a running engine, which has its own model and options: leave {extra} out")
    if not args.shutdown_grace_s >= 0:
        parser.error("--shutdown-grace-s must be at least 0")
    for name in ("max_connections", "max_body_mib", "max_files_mib", "keep_alive_timeout_s"):
        if not getattr(args, name) > 0:
            parser.error(f"--{name.replace('_', '-')} must be greater than 0")
    try:
        if args.engine is not None:
            check_address(args.engine)
        # requests are logged by the frontends, under the names that clients know
        engine = engine_config_from(args, enable_log_requests=False) if args.engine is None else None
        keys = [*args.api_key, *_key_file(args.api_key_file)]
    except ValueError as error:
        parser.error(str(error))
    server_options(parser, args)  # what is wrong with them is said before anything starts
    if not all(keys):
        parser.error("an API key must not be empty")

    with quiet_interrupts():
        from quire.ipc.process.children import CORE_MODULE, prespawn
        from quire.ipc.process.logs import set_up_logging

    set_up_logging()
    prespawned = prespawn(CORE_MODULE) if engine is not None else None  # it loads its modules while we load ours
    try:
        return _serve_with(args, engine, keys, prespawned)
    finally:
        if prespawned is not None:
            prespawned.terminate(0.0)


def _serve_with(args: argparse.Namespace, engine: "EngineConfig | None", keys: list[str], prespawned: "Child | None") -> int:
    with quiet_interrupts():
        from quire.frontend.cli.serve import ServeConfig
        from quire.frontend.cli.serve import main as serve_main
        from quire.frontend.http.server import FrontendConfig
        from quire.frontend.http.server_state import Limits

    frontend_options, serve_options = server_options(args.parser, args)
    limits = Limits(
        max_connections=args.max_connections,
        max_body_bytes=args.max_body_mib << 20,
        keep_alive_timeout_s=args.keep_alive_timeout_s,
    )
    frontend = FrontendConfig(
        engine_address=args.engine or "",
        listen_fd=-1,
        api_keys=keys,
        metrics_open=args.metrics_open,
        allowed_origins=args.allowed_origins,
        log_requests=args.enable_log_requests,
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        trust_request_chat_template=args.trust_request_chat_template,
        shutdown_grace_s=args.shutdown_grace_s,
        curve_key_file=args.curve_key_file,
        curve_engine_key=args.curve_engine_key,
        otlp_traces_endpoint=args.otlp_traces_endpoint,
        limits=limits,
        files_dir=args.files_dir,
        max_files_mib=args.max_files_mib,
        **frontend_options,
    )
    config = ServeConfig(
        host=args.host, port=args.port, num_frontends=args.frontends, engine=engine, frontend=frontend, **serve_options
    )
    return serve_main(config, prespawned)


def _engine_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> str:
    """What was given that is the engine's, as it was written."""
    from quire.ipc.config import EngineConfig

    fields = [n for n in EngineConfig.__struct_fields__ if n != "enable_log_requests"]  # that one is ours as well
    names = [n for n in fields if getattr(args, n, None) != parser.get_default(n)]
    return ", ".join("the model" if name == "model" else f"--{name.replace('_', '-')}" for name in names)


def _origins(text: str) -> tuple[str, ...]:
    """A JSON list, as vLLM takes it, or origins with commas between them."""
    try:
        origins = json.loads(text) if text.lstrip().startswith("[") else [part.strip() for part in text.split(",")]
    except ValueError:
        origins = None
    if not isinstance(origins, list) or not all(isinstance(origin, str) and origin for origin in origins):
        raise argparse.ArgumentTypeError("origins are like https://example.org, with commas between them, or a JSON list")
    return tuple(origins)


def _port(text: str) -> int:
    port = int(text) if text.isdecimal() else -1
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError("a port is between 0 and 65535")
    return port


def _key_file(path: str | None) -> list[str]:
    """Keys of a file, one a line. Raises ValueError."""
    if path is None:
        return []
    try:
        with open(path) as file:
            keys = [line.strip() for line in file if line.strip()]
    except OSError as error:
        raise ValueError(f"--api-key-file {path}: {error.strerror}") from None
    if not keys:
        raise ValueError(f"--api-key-file {path}: no key in this file: anyone could connect")
    return keys


# ------------------------------------------------------------------------------------------------------------- quire chat
def _add_chat(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    chat = commands.add_parser(
        "chat",
        help="talk to a served model in the terminal",
        description="Talk to any OpenAI-compatible server. Ctrl-C stops an answer, /clear forgets, /exit (or Ctrl-D) leaves. "
        "With text piped in, answers it once.",
    )
    chat.add_argument("--url", default="http://127.0.0.1:8000", help="where the server is (default: %(default)s)")
    chat.add_argument("--model", help="which of its models (default: its first)")
    chat.add_argument("--api-key", help="the server's key (default: none)")
    chat.add_argument("--system", help="a system message (default: none)")
    chat.add_argument("--max-tokens", type=int, help="longest answer, in tokens (default: what the server allows)")
    chat.add_argument("--temperature", type=float, help="0 gives the same answer each time (default: the server's)")
    chat.set_defaults(run=_chat, parser=chat)


def _chat(args: argparse.Namespace) -> int:
    from quire.frontend.cli.chat import ChatOptions, chat

    return chat(
        ChatOptions(
            url=args.url,
            model=args.model,
            api_key=args.api_key,
            system=args.system,
            max_tokens=args.max_tokens,
            temperature=args.temperature,
        )
    )


if __name__ == "__main__":
    sys.exit(main())

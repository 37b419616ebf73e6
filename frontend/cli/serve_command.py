"""`quire serve` from command line to running server: config file, vLLM's flags, checks, keys; serve.py does the rest.

Only argparse is imported until the flags are known to be valid, so that help and errors appear at once.
"""

import argparse
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.frontend.cli.media_flags import takes_text_alone
from quire.frontend.cli.serve_flags import add_route_arguments, add_serve_arguments
from quire.frontend.cli.server_flags import server_options
from quire.frontend.cli.vllm_compat import unread_variables, without_vllms
from quire.ipc.process.command import CommandParser, quiet_interrupts
from quire.ipc.process.flags import profile_dir_of, split_flag

if TYPE_CHECKING:
    from quire.frontend.http.server import FrontendConfig
    from quire.ipc.config import EngineConfig
    from quire.ipc.process.children import Child

KEY_VARIABLE = "VLLM_API_KEY"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_OURS_TOO = ("enable_log_requests", "log_level", "log_format", "frontends")  # engine options that frontends use, too
_POSITIVE = (
    "max_connections", "max_body_mib", "max_files_mib", "keep_alive_timeout_s", "h11_max_header_count",
    "h11_max_incomplete_event_size",
)  # fmt: skip


def add_serve(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    serve = commands.add_parser(
        "serve",
        help="serve a model over an OpenAI-compatible HTTP API",
        description="Serve a model over an OpenAI-compatible HTTP API; without MODEL, a tiny bundled one. Flags have vLLM's "
        "names where vLLM has them.",
        epilog="example: quire serve Qwen/Qwen3-0.6B --port 8000",
        usage="quire serve [MODEL] [FLAGS]",
        add_help=False,
    )
    add_serve_arguments(serve)
    serve.set_defaults(run=_serve, parser=serve, prepare=prepare, notes=())


def add_route(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    route = commands.add_parser(
        "route",
        help="serve engines that run already, as one server",
        description="Run the HTTP server of `quire serve` for engines of one model that run already (`enginecore`). A request "
        "goes to an engine that has cached the beginning of its prompt, load permitting; if that one refuses it, to the next.",
        epilog="example: quire route ipc:///run/quire/a.sock ipc:///run/quire/b.sock --port 8000",
        usage="quire route ADDRESS [ADDRESS ...] [FLAGS]",
        add_help=False,
    )
    add_route_arguments(route)
    route.set_defaults(run=_route, parser=route, prepare=prepare, notes=())


def prepare(parser: CommandParser, words: list[str]) -> list[str]:
    """The words of a launch line, plus those of its --config, minus vLLM's flags without effect here.

    The removed flags become the parser's default of `notes`. Ends the command for unsupported flags.
    """
    return without_vllms(parser, words + _config_words(parser, words))


def _config_words(parser: CommandParser, words: list[str]) -> list[str]:
    finder = CommandParser(prog=parser.prog, add_help=False)
    finder.add_argument("--config")
    path = finder.parse_known_args([word for word in words if word != "--"])[0].config
    if path is None:
        return []
    from quire.frontend.cli.config_file import words_of

    actions = parser.actions()
    given = {actions[name].dest for word in words if (name := split_flag(word)[0]) in actions}
    if getattr(parser.parse_known_args(without_vllms(parser, words))[0], "model", None) is not None:
        given.add("model_flag")
    return words_of(path, parser, given)


# ---------------------------------------------------------------------------------------------------------------- run
def _serve(args: argparse.Namespace) -> int:
    from quire.ipc.config import engine_config_from

    parser: CommandParser = args.parser
    _check(parser, args)
    try:
        check_engines(args.engine or [])
        # frontends log requests, under the names that clients know
        args.language_model_only = args.language_model_only or takes_text_alone(args)
        engine = engine_config_from(args, enable_log_requests=False) if args.engine is None else None
        keys = _keys(args)
    except ValueError as error:
        parser.error(str(error))
    server_options(parser, args)  # reports errors before anything starts

    with quiet_interrupts():
        from quire.ipc.process.children import CORE_MODULE, prespawn
        from quire.ipc.process.logs import set_up_logging

    set_up_logging(args.log_level, args.log_format)
    prespawned = prespawn(CORE_MODULE) if engine is not None else None  # it imports its modules while we import ours
    try:
        return _serve_with(args, engine, keys, prespawned)
    finally:
        if prespawned is not None:
            prespawned.terminate(0.0)


def _route(args: argparse.Namespace) -> int:
    parser: CommandParser = args.parser
    _check_server(parser, args)
    args.engine = [*args.engine, *args.engines]
    if not args.engine:
        parser.error("the addresses of engines are needed: quire route ADDRESS [ADDRESS ...]")
    try:
        check_engines(args.engine)
        keys = _keys(args)
    except ValueError as error:
        parser.error(str(error))
    server_options(parser, args)
    with quiet_interrupts():
        from quire.ipc.process.logs import set_up_logging

    set_up_logging(args.log_level, args.log_format)
    return _serve_with(args, None, keys, None)


def check_engines(addresses: list[str]) -> None:
    """Raises ValueError for invalid and duplicate addresses."""
    from quire.ipc.layout import MAX_ENGINES
    from quire.ipc.links.paths import check_address

    if len(addresses) > MAX_ENGINES:
        raise ValueError(f"{len(addresses)} engines: there may be {MAX_ENGINES} at most")
    for number, address in enumerate(addresses):
        check_address(address)
        if address in addresses[:number]:
            raise ValueError(f"the engine at {address} is named twice")


def _check(parser: CommandParser, args: argparse.Namespace) -> None:
    _check_server(parser, args)
    if args.model_flag is not None and args.model not in (None, args.model_flag):
        parser.error(f"the model is {args.model} and --model says {args.model_flag}")
    args.model = args.model if args.model is not None else args.model_flag
    for name in ("api_key", "admin_api_key", "served_model_name", "logits_processors", "logits_processors_path"):
        if args.model is None and _took_a_model(getattr(args, name)):
            flag = f"--{name.replace('_', '-')}"
            parser.error(f"{flag} took {getattr(args, name)[-1]} for one of its values: put the model before the flags")
    _take_profiler_config(parser, args)
    _check_chat_template(parser, args.chat_template)
    if args.engine is not None and (extra := _engine_options(parser, args)):
        parser.error(f"--engine attaches to running engines, which have their own model and options: leave {extra} out")


def _check_server(parser: CommandParser, args: argparse.Namespace) -> None:
    """Check the flags that `quire serve` and `quire route` share."""
    if not 1 <= args.frontends <= 64:
        parser.error("--frontends must be between 1 and 64")
    if not args.shutdown_grace_s >= 0:
        parser.error("--shutdown-grace-s must be at least 0")
    for name in _POSITIVE:
        if not getattr(args, name) > 0:
            parser.error(f"--{name.replace('_', '-')} must be greater than 0")
    if not re.fullmatch(r"[\w.-]{1,64}", args.response_role):
        parser.error("--response-role is a word, like assistant")


def _take_profiler_config(parser: CommandParser, args: argparse.Namespace) -> None:
    """Set --profile-dir from vLLM's JSON."""
    try:
        args.profile_dir = args.profile_dir or profile_dir_of(args.profiler_config)
    except ValueError as error:
        parser.error(f"--profiler-config {error}")


def _check_chat_template(parser: CommandParser, given: str | None) -> None:
    """Check a template, given as a file or as text: an error is reported at the start, not in every chat."""
    if given is None:
        return
    from quire.frontend.text.chat_template import ChatTemplate, ChatTemplateError

    try:
        source = Path(given).expanduser().read_text()
    except (OSError, ValueError):  # the engine decides whether it is a path
        source = given
    try:
        ChatTemplate(source, {})
    except ChatTemplateError as error:
        parser.error(f"--chat-template: {error}")


def _took_a_model(values: list[str]) -> bool:
    """Whether a flag with several values has swallowed the model after it."""
    last = Path(values[-1]) if len(values) > 1 else None
    return last is not None and ((last / "config.json").exists() or (not last.exists() and bool(_HUB_ID.fullmatch(values[-1]))))


def _serve_with(args: argparse.Namespace, engine: "EngineConfig | None", keys: "_Keys", prespawned: "Child | None") -> int:
    with quiet_interrupts():
        from quire.frontend.cli.serve import ServeConfig, log
        from quire.frontend.cli.serve import main as serve_main

    if args.notes:
        log.info("taken from the command, but nothing is needed for it here: %s", ", ".join(args.notes))
    if variables := unread_variables(os.environ):
        log.info("environment variables without effect here: %s", variables)
    frontend_options, serve_options = server_options(args.parser, args)
    config = ServeConfig(
        command=args.parser.prog,
        host=args.host,
        port=args.port,
        num_frontends=args.frontends,
        engine=engine,
        frontend=_frontend_config(args, keys, frontend_options),
        read_again=lambda config: _read_again(args, config),
        **serve_options,
    )
    return serve_main(config, prespawned)


def _frontend_config(args: argparse.Namespace, keys: "_Keys", options: dict[str, Any]) -> "FrontendConfig":
    with quiet_interrupts():
        from quire.frontend.http.api.bodies.checked import RequestDefaults
        from quire.frontend.http.server import FrontendConfig
        from quire.frontend.http.server_state import Limits

    limits = Limits(
        max_connections=args.max_connections,
        max_body_bytes=args.max_body_mib << 20,
        max_headers=args.h11_max_header_count,
        max_head_bytes=args.h11_max_incomplete_event_size,
        keep_alive_timeout_s=args.keep_alive_timeout_s,
    )
    return FrontendConfig(
        engine_addresses=args.engine or [],
        router=args.router,
        listen_fd=-1,
        api_keys=keys.ordinary,
        admin_api_keys=keys.admin,
        allowed_hosts=_allowed_hosts(args, keys),
        metrics_open=args.metrics_open,
        has_docs=not args.disable_fastapi_docs,
        allowed_origins=args.allowed_origins,
        allowed_methods=args.allowed_methods,
        allowed_headers=args.allowed_headers,
        allow_credentials=args.allow_credentials,
        log_requests=args.enable_log_requests,
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        trust_request_chat_template=args.trust_request_chat_template,
        log_level=args.log_level,
        log_format=args.log_format,
        access_log=args.access_log,
        access_log_without=args.disable_access_log_for_endpoints,
        request_ids=args.enable_request_id_headers,
        defaults=RequestDefaults(
            response_role=args.response_role,
            chat_template_kwargs=args.default_chat_template_kwargs,
            return_tokens_as_token_ids=args.return_tokens_as_token_ids,
            include_usage=args.enable_force_include_usage,
        ),
        shutdown_grace_s=args.shutdown_grace_s,
        curve_key_file=args.curve_key_file,
        curve_engine_keys=args.curve_engine_key,
        otlp_traces_endpoint=args.otlp_traces_endpoint,
        limits=limits,
        files_dir=args.files_dir,
        max_files_mib=args.max_files_mib,
        **options,
    )


def _engine_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> str:
    """The engine options that were given, as flags."""
    from quire.ipc.config import EngineConfig

    fields = [n for n in EngineConfig.__struct_fields__ if n not in _OURS_TOO]
    names = [n for n in fields if getattr(args, n, None) != parser.get_default(n)]
    return ", ".join("the model" if name == "model" else f"--{name.replace('_', '-')}" for name in names)


# --------------------------------------------------------------------------------------------------------------- keys
class _Keys(NamedTuple):
    ordinary: list[str]
    admin: list[str]


def _keys(args: argparse.Namespace) -> _Keys:
    """API keys from the flags, else from the environment, and the admin's. Raises ValueError."""
    keys = [*args.api_key, *_key_file("--api-key-file", args.api_key_file)]
    admin = [*args.admin_api_key, *_key_file("--admin-api-key-file", args.admin_api_key_file)]
    if not all([*keys, *admin]):
        raise ValueError("an API key must not be empty")
    if both := set(keys) & set(admin):
        raise ValueError(f"--admin-api-key: {len(both)} of its keys {'is' if len(both) == 1 else 'are'} ordinary API keys, too")
    from_environment = os.environ.get(KEY_VARIABLE, "")
    return _Keys(keys or ([from_environment] if from_environment else []), admin)


def _read_again(args: argparse.Namespace, config: "FrontendConfig") -> "FrontendConfig":
    """The configuration with the keys that the files hold now. Raises ValueError."""
    import msgspec

    from quire.frontend.http.limits.limits_file import read_limits

    keys = _keys(args)
    limits = config.key_limits if args.limits is None else read_limits(args.limits)
    return msgspec.structs.replace(config, api_keys=keys.ordinary, admin_api_keys=keys.admin, key_limits=limits)


def _allowed_hosts(args: argparse.Namespace, keys: _Keys) -> tuple[str, ...]:
    """Without keys, a server on a loopback address is reachable for every web page with a name that points to this machine."""
    from quire.frontend.http.api.access import LOCAL_NAMES
    from quire.frontend.http.listener import is_loopback

    if args.allowed_hosts is not None:
        return args.allowed_hosts
    return LOCAL_NAMES if not keys.ordinary and args.uds is None and is_loopback(args.host) else ("*",)


def _key_file(flag: str, path: str | None) -> list[str]:
    """Keys from a file, one per line. Raises ValueError."""
    if path is None:
        return []
    try:
        with open(path) as file:
            keys = [line.strip() for line in file if line.strip()]
    except OSError as error:
        raise ValueError(f"{flag} {path}: {error.strerror}") from None
    if not keys:
        raise ValueError(f"{flag} {path}: no key in this file: anyone could connect")
    return keys

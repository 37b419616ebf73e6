"""Flags about logs, the same for every process that is started by hand: engines, frontends, agents of hosts."""

from collections.abc import Callable

from quire.ipc.process.flags import Switch, one_of

LOG_LEVELS = ("critical", "error", "warning", "info", "debug")


def add_frontend_logs(add: Callable[..., None]) -> None:
    add(
        "--log-level",
        "--uvicorn-log-level",
        type=one_of(LOG_LEVELS, {"trace": "debug"}),
        metavar="LEVEL",
        help="critical, error, warning, info or debug",
    )
    add("--log-format", choices=["text", "json"], help="text, or json: an object for each line")
    add(
        "--enable-log-requests",
        action=Switch,
        help="log each request's id, lengths and parameters, never its text (default: off)",
    )

"""`enginecore [MODEL] --listen ADDRESS`: the engine alone, for frontends that are started elsewhere."""

import sys

from quire.ipc.process.command import CommandParser, quiet_interrupts
from quire.ipc.process.flags import json_flags, normal_words
from quire.ipc.version import VERSION


def command_parser() -> CommandParser:
    from quire.ipc.config import add_engine_arguments

    parser = CommandParser(
        prog="enginecore",
        description="Run a Quire engine without a frontend. Attach frontends with `quire serve --engine ADDRESS`, "
        "or from Python with AsyncClient(ADDRESS).",
    )
    parser.add_argument("--version", action="version", version=f"enginecore {VERSION}")
    parser.add_argument(
        "--listen",
        required=True,
        help="address for frontends: ipc:///path, or tcp://host:port (for other hosts only with keys)",
    )
    parser.add_argument(
        "--curve-secret-key-file",
        help="file of the engine's secret key, for tcp://; it is made if it does not exist (default: no keys)",
    )
    parser.add_argument(
        "--curve-allow-file",
        help="file of the public keys of frontends that may connect over tcp://, one a line (default: no keys)",
    )
    add_engine_arguments(parser)
    return parser


def main(argv: list[str] | None = None) -> None:
    with quiet_interrupts():
        from quire.ipc.config import engine_config_from
        from quire.ipc.process.logs import set_up_logging

        parser = command_parser()
    args = parser.parse_args(normal_words(sys.argv[1:] if argv is None else argv, json_flags(parser)))
    try:
        config = engine_config_from(args)
    except ValueError as error:
        parser.error(str(error))
    if config.data_parallel_size != 1:
        parser.error(
            "--data-parallel-size: this is one engine; `quire serve` starts several, and `quire route` attaches to several"
        )
    set_up_logging(config.log_level, config.log_format)
    with quiet_interrupts():
        from quire.ipc.process.children import WORKER_MODULE, prespawn

        worker = prespawn(WORKER_MODULE)  # it loads torch while this process starts
        from quire.enginecore.daemon import StartupError, run_engine
        from quire.enginecore.stop_signals import Stopped
        from quire.enginecore.worker_profiles import WorkersFailed

    try:
        run_engine(config, lambda address: print(f"Quire engine ready at {address}", flush=True), worker)
    except Stopped as stopped:  # a stop that was asked for is no failure
        print(f"enginecore: {stopped}", file=sys.stderr)
    except (StartupError, WorkersFailed) as error:
        sys.exit(f"enginecore: {error}")


if __name__ == "__main__":
    main()

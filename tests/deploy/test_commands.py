"""Every command line of deploy/ is one that our programs take, and who stops it waits for as long as its drain takes."""

import argparse
from pathlib import Path

import pytest
from deployed import UNITS, Command, commands, docker, read
from launch_lines import parsed, serve_parser

from quire.enginecore.cli import command_parser
from quire.enginecore.daemon import DRAIN_S
from quire.frontend.cli.server_flags import server_options
from quire.frontend.launcher import STOP_GRACE_S
from quire.ipc.config import engine_config_from
from quire.ipc.process.flags import json_flags, normal_words

SPARE_S = 5.0  # last errors, the sockets' ends
NAMES = ["Dockerfile", *(f"compose.yaml {name}" for name in ("quire", "quire-gpu", "engine", "frontend-1", "frontend-2")),
         *UNITS, "kubernetes/quire.yaml"]  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Command]:
    keys = tmp_path_factory.mktemp("keys") / "api-keys"
    keys.write_text("secret\n")
    return {command.where: command for command in commands(keys)}


def arguments(words: list[str]) -> argparse.Namespace:
    if words[0] == "enginecore":
        parser = command_parser()
        return parser.parse_args(normal_words(words[1:], json_flags(parser)))
    assert words[1] == "serve"
    args = parsed(*words[2:])
    server_options(serve_parser(), args)
    return args


def test_all_are_found(found: dict[str, Command]) -> None:
    assert sorted(found) == sorted(NAMES)


@pytest.mark.parametrize("where", NAMES)
def test_a_command_is_taken_by_the_programs_own_parser(found: dict[str, Command], where: str) -> None:
    args = arguments(found[where].words)
    assert not getattr(args, "notes", []), "flags that need nothing here have no place in an example"
    if getattr(args, "engine", None) is None:
        engine_config_from(args)
    if getattr(args, "api_key_file", None) is not None:
        assert Path(args.api_key_file).read_text() == "secret\n"


@pytest.mark.parametrize("where", [name for name in NAMES if name != "Dockerfile"])
def test_whoever_stops_it_waits_for_its_drain(found: dict[str, Command], where: str) -> None:
    command = found[where]
    args = arguments(command.words)
    assert command.grace_s is not None
    if command.words[0] == "enginecore":
        assert command.grace_s >= DRAIN_S + SPARE_S
    else:
        engine_s = STOP_GRACE_S if args.engine is None else 0.0
        assert command.grace_s >= args.drain_delay_s + args.shutdown_grace_s + engine_s + SPARE_S
        assert args.drain_delay_s >= 5, "balancers have to notice"


def test_the_dockerfile_says_how_long_a_stop_takes(found: dict[str, Command]) -> None:
    args = arguments(found["Dockerfile"].words)
    text = read("docker/Dockerfile")
    assert f"docker stop -t {args.drain_delay_s + args.shutdown_grace_s + STOP_GRACE_S + SPARE_S:.0f}," in text
    assert docker("STOPSIGNAL") == ["SIGTERM"]


def test_a_flag_that_is_not_there_is_seen() -> None:
    with pytest.raises((SystemExit, AssertionError)):
        arguments(["quire", "serve", "--drain-deley-s", "5"])
    with pytest.raises(SystemExit):
        arguments(["enginecore", "--listen", "ipc:///x", "--drain-delay-s", "5"])

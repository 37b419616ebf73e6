"""The command line: flags that cannot be, help, hints, and an interrupt before anything runs."""

import argparse
import contextlib
import io
import json
import shlex
import subprocess
import sys

import pytest
from served import (
    DEADLINE_S,
    Served,
)

from quire.frontend.cli import main as cli
from quire.frontend.cli import parser_arguments, serve, serve_flags
from quire.frontend.cli.ready_message import ReadyMessage
from quire.frontend.http.api.access import LOCAL_NAMES
from quire.frontend.http.api.output_plan import ParserNames
from quire.frontend.http.listener import FrontendError, bind
from quire.frontend.http.server import FrontendConfig
from quire.frontend.http.server_state import Limits
from quire.frontend.replicas.router import POLICIES
from quire.frontend.text.harmony.tokens import NAMES
from quire.frontend.text.reasoning_parsers.choice import REASONING_PARSERS
from quire.frontend.text.tool_parsers.choice import TOOL_PARSERS
from quire.ipc.process.command import as_started

REFUSED = set(parser_arguments.REFUSED)


def test_wrong_starts_say_why(tmp_path):
    with bind("127.0.0.1", 0)[0] as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(FrontendError, match="in use; choose another with --port"):
            bind("127.0.0.1", port)
        with pytest.raises(FrontendError, match="in use"):
            bind("127.0.0.1", port, 2)
        with Served("--port", str(port)) as served:  # said before any model is looked for
            code, err = served.wait()
            assert code == 1 and "in use" in err and "Traceback" not in err
    with pytest.raises(FrontendError, match="--host"):
        bind("no such host", 0)
    empty = tmp_path / "keys"
    empty.write_text("\n")
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}")
    for arguments, text in [
        (["--chat-template", "{{ messages"], "--chat-template: the chat template is not valid: unexpected end of template"),
        (["--chat-template", str(template)], "--chat-template: the chat template is not valid: Unexpected end of template"),
        (["--frontends", "0"], "--frontends"), (["--port", "70000"], "--port"), (["--api-key-file", str(empty)], "no key"),
        (["--api-key-file", "/nowhere"], "--api-key-file /nowhere: No such file"), (["--api-key", ""], "empty"),
        (["--block-size", "3"], "--block-size"), (["--max-connections", "0"], "--max-connections"),
        (["--max-body-mib", "0"], "--max-body-mib"), (["--keep-alive-timeout-s", "nan"], "--keep-alive-timeout-s"),
        (["--allowed-origins", '["a", 3]'], "--allowed-origins"),
        (["--allowed-origins", "[a"], "--allowed-origins"), (["--allowed-origins", "a,,b"], "--allowed-origins"),
        (["--tool-call-parser", "json"], "--tool-call-parser"), (["--reasoning-parser", "x"], "--reasoning-parser"),
        (["--tool-call-parser", "step3"], "this parser is for Step3"), (["--tool-call-parser", "jamba"], "recurrent layers"),
        (["--port", "http"], "a port is"), (["--shutdown-grace-s", "nan"], "--shutdown-grace-s"),
        (["model", "--engine", "ipc:///x"], "leave the model out"), (["--engine", "foo"], "foo: an address starts with"),
        (["--engine", "ipc:///x", "--max-model-len", "9", "--enforce-eager"], "leave --max-model-len, --enforce-eager out"),
        (["--engine", "ipc:///x", "--curve-key-file", "k"], "belong together"),
        (["--engine", "ipc:///x", "ipc:///y", "ipc:///x"], "the engine at ipc:///x is named twice"),
        (["--engine", "ipc:///x", "-dp", "2"], "leave --data-parallel-size out"), (["--router", "best"], "--router"),
        (["--engine", "ipc:///x", "ipc:///y", "--curve-key-file", "k", "--curve-engine-key", "a", "b", "c"], "3 keys for 2"),
        (["-dp", "0"], "--data-parallel-size must be between 1 and 64"), (["-dp", "65"], "--data-parallel-size"),
    ]:  # fmt: skip
        err = io.StringIO()
        with contextlib.redirect_stderr(err):
            try:
                code = cli.main(["serve", "--port", "0", *arguments])
            except SystemExit as end:
                code = end.code
        assert code in (1, 2) and text in err.getvalue(), arguments
        assert err.getvalue().count("\n") == 1, arguments


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "ADDRESS"),
        (["nonsense"], "nonsense: an address starts with"),
        (["ipc:///x", "ipc:///x"], "the engine at ipc:///x is named twice"),
        (["ipc:///x", "--engine", "ipc:///y", "ipc:///x"], "the engine at ipc:///x is named twice"),
        (["ipc:///x", "--max-num-seqs", "3"], "unrecognized arguments: --max-num-seqs"),
        (["ipc:///x", "--frontends", "0"], "--frontends"),
        ([f"ipc:///x{i}" for i in range(65)], "65 engines: there may be 64 at most"),
        (["ipc:///x", "--ssl-keyfile", "k"], "TLS needs --ssl-certfile"),
        (["ipc:///x", "--allowed-hosts", "http://a"], "'http://a' is no host's name"),
        (["ipc:///x", "--admin-api-key-file", "/nowhere"], "--admin-api-key-file /nowhere"),
    ],
)
def test_wrong_starts_of_a_router_say_why(arguments, text, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["route", "--port", "0", *arguments])
    err = capsys.readouterr().err
    assert end.value.code == 2 and text in err and err.count("\n") == 1 and err.startswith("quire route: ")


def test_a_router_has_the_servers_flags_and_no_engines(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("quire.frontend.cli.serve.main", lambda config, prespawned: asked.append(config) or 0)
    file = tmp_path / "flags.yaml"
    file.write_text("router: least-loaded\nfrontends: 3\n")
    words = ["ipc:///x", "tcp://h:1", "--config", str(file), "--frontends", "2", "--api-key", "k", "--log-level", "error"]
    assert cli.main(["route", *words]) == 0
    (config,) = asked
    assert config.engine is None and config.num_frontends == 2 and config.frontend.router == "least-loaded"
    assert config.frontend.engine_addresses == ["ipc:///x", "tcp://h:1"] and config.frontend.api_keys == ["k"]
    keys, admin = tmp_path / "keys", tmp_path / "admin"
    keys.write_text("a\nb\n")
    admin.write_text("root\n")
    files = ["--api-key-file", str(keys), "--admin-api-key-file", str(admin), "--admin-api-key", "second"]
    for flags in ([], ["--host", "localhost"], ["--host", "127.0.0.2"], ["--admin-api-key", "k"]):
        assert cli.main(["route", "ipc:///x", *flags]) == 0 and asked[-1].frontend.allowed_hosts == LOCAL_NAMES, flags
    assert cli.main(["route", "ipc:///x", "--allowed-hosts", "a.org,*.a.org"]) == 0
    assert asked[-1].frontend.allowed_hosts == ("a.org", "*.a.org")
    for flags in (["--host", "0.0.0.0"], ["--uds", "x"], ["--api-key", "k"], files):
        assert cli.main(["route", "ipc:///x", *flags]) == 0 and asked[-1].frontend.allowed_hosts == ("*",), flags
    config = asked[-1].frontend
    assert config.api_keys == ["a", "b"] and config.admin_api_keys == ["second", "root"]
    keys.write_text("c\n")
    again = asked[-1].read_again(config)
    assert (again.api_keys, again.admin_api_keys) == (["c"], ["second", "root"]) and again.limits == config.limits
    admin.write_text("c\n")
    with pytest.raises(ValueError, match="--admin-api-key: 1 of its keys is"):
        asked[-1].read_again(config)


@pytest.mark.parametrize("command", ["serve", "route"])
def test_what_ends_a_server_is_said_under_its_commands_name(command, monkeypatch, capsys):
    def end(config, *_):
        raise serve.ServeError("no engine at any of them")

    monkeypatch.setattr(serve, "run_server", end)
    engines = ["ipc:///x"] if command == "route" else ["--engine", "ipc:///x"]
    assert cli.main([command, *engines]) == 1
    assert capsys.readouterr().err == f"quire {command}: no engine at any of them\n"


def test_parsers_of_models_that_do_not_run_are_refused_with_the_reason(capsys):
    """vLLM 0.2x's names of parsers that are missing here are all of such models."""
    tools = "deepseek_v32 deepseek_v4 internlm jamba kimi_k3 minimax minimax_m3 minicpm5 step3 step3p5 inkling solar_open2"
    reasoning = "deepseek_v4 kimi_k3 minimax_m3 step3 step3p5 inkling solar_open2"
    for flag, names in (("--tool-call-parser", tools), ("--reasoning-parser", reasoning)):
        for name in names.split():
            with pytest.raises(SystemExit):
                cli.main(["serve", flag, name])
            err = capsys.readouterr().err
            assert (f"{name}: this parser is for " in err and " served here" in err) or "never loaded here" in err, err
    assert not REFUSED & (set(TOOL_PARSERS) | set(REASONING_PARSERS))


def test_the_flags_know_every_parser():
    assert serve_flags.ROUTERS == POLICIES
    assert tuple(sorted(TOOL_PARSERS)) == parser_arguments.TOOL_CALL_PARSERS
    parser = argparse.ArgumentParser()
    parser_arguments.add_parser_arguments(parser)
    for name in (*NAMES, "OpenAI"):
        given = parser.parse_args(["--tool-call-parser", name, "--reasoning-parser", name])
        assert ParserNames(given.tool_call_parser, given.reasoning_parser).is_harmony("")
    assert tuple(sorted(REASONING_PARSERS)) == parser_arguments.REASONING_PARSERS


@pytest.mark.parametrize(
    ("arguments", "help_of"),
    [(["--flg"], ""), (["srve"], ""), (["serve", "--flg", "3"], " serve"), (["chat", "--max-tokens", "x"], " chat")],
)
def test_a_wrong_flag_is_said_in_a_line(arguments, help_of, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    err = capsys.readouterr().err
    assert end.value.code == 2 and err.count("\n") == 1
    assert err.startswith(f"quire{help_of}: ") and err.endswith(f"; see 'quire{help_of} --help'\n")
    assert arguments[-1] in err or "--flg" in err


def test_hints_name_the_command_as_it_was_started(tmp_path, monkeypatch):
    installed, linked = tmp_path / "quire", tmp_path / "bin" / "quire"
    linked.parent.mkdir()
    installed.touch(0o755)
    linked.symlink_to(installed)
    for started, path, shown in (
        (str(installed), "/nowhere", f"{installed} chat"),
        (str(installed), str(linked.parent), "quire chat"),
        ("my env/bin/quire", str(linked.parent), "'my env/bin/quire' chat"),
        ("/usr/lib/cli.py", "/nowhere", "quire chat"),  # python -m
    ):
        monkeypatch.setattr(sys, "argv", [started])
        monkeypatch.setenv("PATH", path)
        assert as_started("quire chat") == shown


def test_the_package_is_the_command_too():
    words = [sys.executable, "-P", "-m", "quire", "serve", "--port", "x"]
    run = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S)
    assert run.returncode == 2 and run.stderr.startswith("quire serve: argument --port")
    assert run.stderr.endswith(f"see '{sys.executable} -m quire serve --help'\n")


def test_flags_of_the_server_as_they_are_understood():
    parse = cli._parser().parse_args
    assert parse(["serve"]).max_body_mib << 20 == Limits().max_body_bytes
    assert parse(["serve"]).allowed_origins == FrontendConfig(engine_addresses=[], listen_fd=-1).allowed_origins == ("*",)
    for text in ('["https://a", "http://b:1"]', "https://a,http://b:1", "https://a, http://b:1"):
        assert parse(["serve", "--allowed-origins", text]).allowed_origins == ("https://a", "http://b:1")


def test_an_interrupt_while_a_command_is_being_imported_is_quiet(tmp_path):
    for module, attribute, argument in (("frontend.cli", "main", "serve"), ("enginecore", "cli", "--listen=ipc:///nowhere/x")):
        late = "quire.frontend.cli.serve" if argument == "serve" else "quire.enginecore.daemon"
        code = f"""
import signal, sys
from quire.{module} import {attribute} as cli

class Interrupted:  # Ctrl-C in the middle of the imports
    def find_spec(self, name, path, target=None):
        if name == {late!r}:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupted())
sys.exit(cli.main([{argument!r}]))
"""
        run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=DEADLINE_S)
        assert (run.returncode, run.stdout, run.stderr) == (130, "", ""), module


def test_help_and_version_are_quick():
    for arguments in (["version"], ["--help"], ["serve", "--help"], ["chat", "--help"]):
        code = "import sys; from quire.frontend.cli import main as cli\ntry: cli.main(sys.argv[1:])\nexcept SystemExit: pass\n"
        code += "heavy = {'torch', 'transformers', 'zmq', 'uvloop', 'tokenizers', 'numpy'}\n"
        code += "print('IMPORTED', *(heavy & set(sys.modules)))"
        run = subprocess.run([sys.executable, "-P", "-c", code, *arguments], capture_output=True, text=True, check=True)
        assert run.stdout.endswith("IMPORTED\n"), arguments
        assert "quire" in run.stdout


def test_the_ready_message_can_be_pasted(capsys):
    ReadyMessage("0.0.0.0", 80, False)("it's")
    ReadyMessage("::", 80, True)("m")
    lines = capsys.readouterr().out.splitlines()
    assert "http://127.0.0.1:80" in lines[0] and "http://[::1]:80" in lines[3] and "YOUR_KEY" in lines[4]
    assert json.loads(shlex.split(lines[1])[-1])["model"] == "it's"


def test_the_ready_message_shows_what_the_model_can_do(capsys):
    ReadyMessage("0.0.0.0", 80, False)("m", ("embed", "token_embed"))
    first, second = capsys.readouterr().out.splitlines()
    assert "/v1/embeddings" in second and json.loads(shlex.split(second)[-1])["input"] and "chat" not in first + second


@pytest.mark.parametrize(
    ("word", "meant"),
    [("run", "quire chat MODEL"), ("pull", "quire serve MODEL"), ("list", "quire models"), ("srve", "quire serve")],
)
def test_commands_of_other_programs_are_answered_with_ours(word, meant, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([word, "some/model"])
    assert ended.value.code == 2 and f"there is no command {word!r}; did you mean {meant}" in capsys.readouterr().err


def test_a_command_that_resembles_none_gets_the_list(capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "xyz"])
    assert "quire bench: there is no command 'xyz'; there are serve, throughput," in capsys.readouterr().err

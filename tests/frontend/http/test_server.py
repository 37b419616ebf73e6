"""Whole processes over real sockets: `quire serve` attached to a fake core, the openai client, `quire chat`, and every end."""

import contextlib
import http.client
import http.server
import io
import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest
from fake_core import FakeCore, outputs
from serving import until
from toy_tokenizers import byte_level

from quire.frontend.cli import main as cli
from quire.frontend.cli.chat import ChatError, ChatOptions, ChatServer, Conversation, chat
from quire.frontend.cli.serve import ReadyMessage
from quire.frontend.http.server import FrontendConfig, FrontendError, bind
from quire.frontend.http.server_state import Limits
from quire.ipc.messages import Abort, AddRequest, EngineLimits
from quire.ipc.process.command import as_started

DEADLINE_S = 30.0
ROOMY = EngineLimits(max_model_len=4096, vocab_size=400, max_num_seqs=4, max_logprobs=20)


def say_hi(request: AddRequest, child: int) -> list[int]:
    return byte_level().encode("hello world!").ids


class Served:
    """`quire serve` as a child process, from its first line to its exit code."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-P", "-m", "quire.frontend.cli.main", "serve", "--port", "0", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
        self.lines: list[str] = []

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def url(self) -> str:
        """Waits until it is ready."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], DEADLINE_S)
        assert ready, "not ready in time"
        self.lines = [self.process.stdout.readline().decode() for _ in range(3)]
        assert "http://" in self.lines[0], (self.lines, self.process.communicate())
        return "http://" + self.lines[0].strip().partition("http://")[2]

    def end(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """Exit code and what it had to say on stderr."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> tuple[int, str]:
        _, err = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, err.decode()


def request(url: str, method: str, path: str, body: dict | None = None, key: str | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=DEADLINE_S)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    connection.request(method, path, json.dumps(body) if body is not None else None, headers)
    response = connection.getresponse()
    try:
        return response.status, response.read()
    finally:
        connection.close()


def until_healthy(url: str, status: int) -> None:
    """Wait until /health says so."""
    until(lambda: request(url, "GET", "/health")[0] == status)


# --------------------------------------------------------------------------------------------------------------- serve
def test_the_openai_client_is_served():
    openai = pytest.importorskip("openai")
    with FakeCore(say_hi, limits=ROOMY) as core, Served("--engine", core.address, "--api-key", "k") as served:
        url = served.url()
        assert "curl" in served.lines[1] and '"model": "toy"' in served.lines[1] and "quire chat" in served.lines[2]
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0, timeout=DEADLINE_S)
        assert [m.id for m in client.models.list()] == ["toy"]
        messages = [{"role": "user", "content": "hi"}]
        options = {"model": "toy", "messages": messages, "n": 2}
        whole = client.chat.completions.create(**options)
        assert [c.message.content for c in whole.choices] == ["hello world!"] * 2
        assert whole.usage.completion_tokens == 2 * len(say_hi(None, 0)) and whole.choices[0].finish_reason == "length"
        texts = ["", ""]
        for chunk in client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
            usage = chunk.usage
        assert texts == ["hello world!"] * 2 and usage == whole.usage
        completion = client.completions.create(model="toy", prompt=["a", "b"], max_tokens=20, echo=True)
        assert [c.text for c in completion.choices] == ["ahello world!", "bhello world!"]
        streamed = client.completions.create(model="toy", prompt="a", max_tokens=20, stream=True)
        assert "".join(c.choices[0].text for c in streamed) == "hello world!"
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="other", messages=messages)
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.chat.completions.create(model="toy", messages=messages, temperature=-1)
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()
        client.close()
        code, err = served.end()
        assert code == 0, err


def test_a_client_that_leaves_ends_its_request_in_the_core():
    with FakeCore() as core, Served("--engine", core.address) as served:
        url = served.url()
        connection = http.client.HTTPConnection(url.removeprefix("http://"))
        body = json.dumps({"prompt": [1, 2], "max_tokens": 10})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        added = next_of(core, AddRequest)
        connection.close()
        assert next_of(core, Abort).ids == [added.id]


def next_of(core: FakeCore, kind: type):
    """The next message of this kind, heartbeats and greetings aside."""
    while True:
        message = core._received.get(timeout=DEADLINE_S)
        if isinstance(message, kind):
            return message


def test_a_client_that_sends_too_much_is_told_and_not_cut_off():
    with FakeCore() as core, Served("--engine", core.address, "--max-body-mib", "1", "--api-key", "k") as served:
        url = served.url()
        big = {"prompt": "x" * (5 << 20)}
        status, body = request(url, "POST", "/v1/completions", big, "k")
        assert status == 413 and json.loads(body)["error"]["code"] == "body_too_large"
        assert request(url, "POST", "/v1/completions", big)[0] == 401


def test_it_outlives_the_core_and_finds_the_next_one(tmp_path):
    address = f"ipc://{tmp_path}/core.sock"
    with Served("--engine", address) as served:
        with FakeCore(say_hi, address=address):
            url = served.url()
            assert request(url, "GET", "/health")[0] == 200
        until_healthy(url, 503)
        status, body = request(url, "POST", "/v1/completions", {"prompt": "a"})
        assert status == 503 and json.loads(body)["error"]["code"] == "engine_down"
        with FakeCore(say_hi, address=address):
            until_healthy(url, 200)
            status, body = request(url, "POST", "/v1/completions", {"prompt": "a"})
            assert status == 200 and json.loads(body)["choices"][0]["text"] == "hello world!"
            assert served.end(signal.SIGINT)[0] == 0


def test_health_follows_the_beat():
    with FakeCore(say_hi) as core, Served("--engine", core.address) as served:
        url = served.url()
        core.announce(oldest_step_s=61.0)
        until_healthy(url, 503)
        core.announce(oldest_step_s=0.0)
        until_healthy(url, 200)
        core.announce(ready=False)
        until_healthy(url, 503)


def test_a_stop_lets_a_stream_end_first():
    with FakeCore() as core, Served("--engine", core.address) as served:
        url = served.url()
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=DEADLINE_S)
        body = json.dumps({"prompt": [1, 2], "max_tokens": 2, "stream": True})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        key = next_of(core, AddRequest).id << 8
        say(core, key, 70)
        response = connection.getresponse()
        first = response.readline()
        served.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + DEADLINE_S
        while True:  # nobody new is let in
            assert time.monotonic() < deadline
            with contextlib.suppress(ConnectionError), socket.create_connection(address_of(url)):
                continue
            break
        say(core, key, 71, "length")
        rest = response.read()
        assert first.startswith(b"data: {") and rest.endswith(b"data: [DONE]\n\n")
        assert served.wait()[0] == 0
        connection.close()


def say(core: FakeCore, key: int, token: int, reason: str | None = None) -> None:
    core.say(outputs([(key, token)], {key: reason} if reason else None, epoch=core.epoch))


def address_of(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)


def test_several_frontends_share_a_port_and_their_metrics():
    with FakeCore(say_hi) as core, Served("--engine", core.address, "--frontends", "2") as served:
        url = served.url()
        for _ in range(12):
            assert request(url, "POST", "/v1/completions", {"prompt": "a"})[0] == 200
        _, text = request(url, "GET", "/metrics")
        assert b'quire:http_requests_total{handler="/v1/completions",status="2xx"} 12.0' in text
        process = psutil.Process(served.process.pid)
        first = min(process.children(), key=psutil.Process.create_time)
        first.kill()
        until(lambda: first not in process.children() and len(process.children()) == 2)
        code, err = served.end()
        assert (
            code == 0
            and "frontend process 0 ended unexpectedly (signal SIGKILL); others take its connections; next start in 1 s" in err
        ), err


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
    for arguments, text in [
        (["--frontends", "0"], "--frontends"), (["--port", "70000"], "--port"), (["--api-key-file", str(empty)], "no key"),
        (["--api-key-file", "/nowhere"], "--api-key-file /nowhere: No such file"), (["--api-key", ""], "empty"),
        (["--block-size", "3"], "--block-size"), (["--max-connections", "0"], "--max-connections"),
        (["--max-body-mib", "0"], "--max-body-mib"), (["--keep-alive-timeout-s", "nan"], "--keep-alive-timeout-s"),
        (["--allowed-origins", '["a", 3]'], "--allowed-origins"),
        (["--allowed-origins", "[a"], "--allowed-origins"), (["--allowed-origins", "a,,b"], "--allowed-origins"),
        (["--port", "http"], "a port is"), (["--shutdown-grace-s", "nan"], "--shutdown-grace-s"),
        (["model", "--engine", "ipc:///x"], "leave the model out"), (["--engine", "foo"], "foo: an address starts with"),
        (["--engine", "ipc:///x", "--max-model-len", "9", "--enforce-eager"], "leave --max-model-len, --enforce-eager out"),
        (["--engine", "ipc:///x", "--curve-key-file", "k"], "belong together"),
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


def test_flags_of_the_server_as_they_are_understood():
    parse = cli._parser().parse_args
    assert parse(["serve"]).max_body_mib << 20 == Limits().max_body_bytes
    assert parse(["serve"]).allowed_origins == FrontendConfig(engine_address="", listen_fd=-1).allowed_origins == ("*",)
    for text in ('["https://a", "http://b:1"]', "https://a,http://b:1", "https://a, http://b:1"):
        assert parse(["serve", "--allowed-origins", text]).allowed_origins == ("https://a", "http://b:1")


def test_a_stop_while_looking_for_the_engine(tmp_path):
    with Served("--engine", f"ipc://{tmp_path}/nobody.sock") as served:
        wait_for_signal_handler(served.process.pid, signal.SIGTERM)
        assert served.end()[0] in (0, 143)  # still starting, or already waiting: either way it ends at once


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_while_several_frontends_look_for_the_engine(tmp_path, number):
    with Served("--engine", f"ipc://{tmp_path}/nobody.sock", "--frontends", "2") as served:
        process = psutil.Process(served.process.pid)
        deadline = time.monotonic() + DEADLINE_S
        while len(children := process.children()) < 2:
            assert time.monotonic() < deadline
            os.sched_yield()
        for child in children:
            wait_for_signal_handler(child.pid, signal.SIGTERM)
        started = time.monotonic()
        code, err = served.end(number)
        waits, stopped = err.splitlines()
        assert code == 0 and f"waiting for an engine at ipc://{tmp_path}/nobody.sock" in waits and stopped.endswith("stopped")
        assert time.monotonic() - started < 10.0  # not when they give up


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


def test_a_server_goes_on_when_nobody_reads_what_it_writes():
    command = [sys.executable, "-P", "-m", "quire.frontend.cli.main", "serve", "--engine"]
    with FakeCore(say_hi) as core, bind("127.0.0.1", 0)[0] as free:
        port = str(free.getsockname()[1])
        free.close()
        reads, writes = os.pipe()
        os.close(reads)
        for redirected in ({"stdout": writes, "stderr": writes}, {"preexec_fn": lambda: os.closerange(0, 3)}):
            process = subprocess.Popen([*command, core.address, "--port", port], **redirected)
            try:
                until_it_listens(port)
                assert request(f"http://127.0.0.1:{port}", "GET", "/health")[0] == 200
                assert [os.readlink(f"/proc/{process.pid}/fd/{fd}") for fd in range(3)].count("/dev/null") in (0, 1, 3)
                process.send_signal(signal.SIGTERM)
                assert process.wait(DEADLINE_S) == 0
            finally:
                process.kill()
                process.wait()
        os.close(writes)


def until_it_listens(port: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", int(port))):
            return
        os.sched_yield()
    raise AssertionError("it does not listen in time")


def wait_for_signal_handler(pid: int, number: signal.Signals) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        with open(f"/proc/{pid}/status") as status:
            caught = int(next(line.split()[1] for line in status if line.startswith("SigCgt")), 16)
        if caught >> (number - 1) & 1:
            return
        os.sched_yield()
    raise AssertionError("no handler in time")


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


# ---------------------------------------------------------------------------------------------------------------- chat
def test_chat_answers_piped_text_and_keeps_the_conversation(capsys):
    with FakeCore(say_hi, limits=ROOMY) as core, Served("--engine", core.address, "--api-key", "k") as served:
        url = served.url()
        options = ChatOptions(url=url, api_key="k", system="be brief", max_tokens=40, temperature=0.0)
        out = io.StringIO()
        assert chat(options, io.StringIO("hi\n"), out) == 0 and out.getvalue() == "hello world!\n"
        conversation = Conversation(ChatServer(url, "k"), options, "toy")
        conversation.ask("one", out)
        conversation.ask("two", out)
        assert [m["role"] for m in conversation.messages] == ["system", "user", "assistant", "user", "assistant"]
        conversation.clear()
        assert conversation.messages == [{"role": "system", "content": "be brief"}]
        with pytest.raises(ChatError, match="does not exist"):
            Conversation(ChatServer(url, "k"), options, "other").ask("hi", out)
        assert chat(ChatOptions(url=url), io.StringIO("hi"), out) == 1
        assert "--api-key" in capsys.readouterr().err


def test_chat_in_a_terminal(monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def type_lines(*lines: str | type[BaseException]) -> None:
        left = iter(lines)

        def read(prompt: str) -> str:
            line = next(left)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr("builtins.input", read)

    with FakeCore(say_hi, limits=ROOMY) as core, Served("--engine", core.address) as served:
        options = ChatOptions(url=served.url())
        out = io.StringIO()
        type_lines("hi", "", KeyboardInterrupt, "/clear", "again", "/exit")
        assert chat(options, Terminal(), out) == 0
        assert out.getvalue().count("hello world!\n") == 2
        first = [next_of(core, AddRequest).inputs.token_ids for _ in range(2)]
        assert first[0] != first[1] and len(first[1]) < 2 * len(first[0])  # nothing of "hi" is left after /clear
        out.truncate(0)
        type_lines("/help", "/clera all", "//etc", "/quit")
        assert chat(options, Terminal(), out) == 0
        assert "/clear   forget" in out.getvalue() and "/clera is no command: /help" in out.getvalue()
        assert out.getvalue().count("hello world!\n") == 1
        sent = np.frombuffer(next_of(core, AddRequest).inputs.token_ids, "<i4").tolist()
        assert "/etc" in byte_level().decode(sent) and "//etc" not in byte_level().decode(sent)
        served.end()
        type_lines("anyone?", EOFError)
        assert chat(ChatOptions(url=options.url, model="toy"), Terminal(), out) == 0
        assert "nobody answers" in capsys.readouterr().err


def test_chat_says_when_nobody_is_there(capsys):
    with bind("127.0.0.1", 0)[0] as unused:
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        assert chat(ChatOptions(url=url), io.StringIO("hi")) == 1
    err = capsys.readouterr().err
    assert "nobody answers" in err and "quire serve" in err
    assert chat(ChatOptions(url="ftp://x"), io.StringIO("hi")) == 1
    assert "an URL like" in capsys.readouterr().err
    assert chat(ChatOptions(url="http://[x"), io.StringIO("hi")) == 1
    assert "not an URL" in capsys.readouterr().err
    assert chat(ChatOptions(url=url, api_key="a\nb"), io.StringIO("hi")) == 1
    assert "--api-key" in capsys.readouterr().err


def test_chat_with_input_that_is_no_text_and_with_nobody_who_reads():
    with FakeCore(say_hi, limits=ROOMY) as core, Served("--engine", core.address, "--api-key", "ключ") as served:
        command = [sys.executable, "-m", "quire.frontend.cli.main", "chat", "--url", served.url(), "--api-key", "ключ"]
        strict = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
        done = subprocess.run(command, input=b"\xff hi", capture_output=True, timeout=DEADLINE_S, env=strict)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"hello world!\n", b"")
        reads, writes = os.pipe()
        os.close(reads)
        done = subprocess.run(command, input=b"hi", stdout=writes, stderr=subprocess.PIPE, timeout=DEADLINE_S)
        os.close(writes)
        assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b'{"data": null}', "offers no model"),
        (b'{"data": [5]}', "offers no model"),
        (b"[]", "no model"),
        (b"<html>", "not JSON"),
    ],
)
def test_chat_with_a_server_of_another_kind(capsys, answer, said):
    class Strange(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n" + answer)

        def do_POST(self) -> None:
            lines = (b'data: {"choices": null}', b'data: {"choices": [null, {"delta": [], "index": 0}]}', b"data: [DONE]")
            self.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n" + b"\n".join(lines))

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Strange) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        url, out = f"http://127.0.0.1:{server.server_port}", io.StringIO()
        try:
            assert chat(ChatOptions(url=url), io.StringIO("hi"), out) == 1
            assert said in capsys.readouterr().err
            assert chat(ChatOptions(url=url, model="m"), io.StringIO("hi"), out) == 0 and out.getvalue() == "\n"
        finally:
            server.shutdown()


def test_ctrl_c_stops_an_answer_and_the_request():
    with FakeCore() as core, Served("--engine", core.address) as served:
        url = served.url()
        out = io.StringIO()
        conversation = Conversation(ChatServer(url), ChatOptions(url=url), "toy")

        def interrupt() -> None:
            key = next_of(core, AddRequest).id << 8
            say(core, key, 70)
            while not out.getvalue():
                os.sched_yield()
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            say(core, key, 71)  # wakes a read that began between the signal and its handler

        helper = threading.Thread(target=interrupt)
        helper.start()
        assert not conversation.ask("hi", out)
        helper.join()
        assert out.getvalue().endswith(" [stopped]\n")
        assert [m["role"] for m in conversation.messages] == ["user", "assistant"]
        next_of(core, Abort)

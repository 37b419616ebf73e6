"""`quire chat` beyond a plain answer: a server of its own and its end, reasoning, commands, several lines, TLS."""

import base64
import contextlib
import http.server
import io
import json
import os
import select
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from certificates import authority, certified
from deadlines import DEADLINE_S
from http_servers import answering, url_of
from terminals import Terminal, type_lines

from quire.enginecore.loading.model_files import BUNDLED
from quire.frontend.cli.chat import ChatOptions, chat
from quire.frontend.http.listener import bind

COMMAND = [sys.executable, "-P", "-m", "quire.frontend.cli.main", "chat"]


class Reasoner(http.server.BaseHTTPRequestHandler):
    """Thinks, and repeats the last message."""

    asked: ClassVar[list[dict]] = []

    def do_GET(self) -> None:
        cards = [{"id": "small", "root": "/models/small-1b"}, {"id": "large"}]
        self._send(json.dumps({"data": cards}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        said = body["messages"][-1]["content"]
        deltas = [{"reasoning": "hmm"}, {"content": said if isinstance(said, str) else said[-1]["text"]}]
        events = [f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n" for delta in deltas]
        self._send("".join([*events, "data: [DONE]\n\n"]).encode())

    def _send(self, data: bytes) -> None:
        self.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n" + data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def reasoner() -> Iterator[str]:
    Reasoner.asked.clear()
    with answering(http.server.HTTPServer(("127.0.0.1", 0), Reasoner)) as server:
        yield url_of(server)


def talk(monkeypatch, options: ChatOptions, *lines: str) -> str:
    """What a terminal shows when these lines are typed."""
    type_lines(monkeypatch, *lines, "/exit")
    out = Terminal()
    assert chat(options, Terminal(), out) == 0
    return out.getvalue()


def unused_url() -> str:
    with bind("127.0.0.1", 0)[0] as unused:
        return f"http://127.0.0.1:{unused.getsockname()[1]}"


# ------------------------------------------------------------------------------------------------- a server of its own
def test_piped_text_is_answered_by_a_server_that_starts_and_ends_with_the_chat():
    command = [*COMMAND, str(BUNDLED), "--url", unused_url(), "--max-tokens", "4", "--", "--max-model-len", "128"]
    done = subprocess.run(command, input="Hello", capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
    assert done.stderr == f"quire chat: starting a server for {BUNDLED}\n"


@contextlib.contextmanager
def in_a_terminal(command: list[str] | None = None) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """A chat with a server of its own, or a command, as its terminal's foreground: the terminal's end, and the process."""
    ours, theirs = os.openpty()
    command = command or [*COMMAND, str(BUNDLED), "--url", unused_url(), "--", "--max-model-len", "128"]
    begin = f"import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv({command[0]!r}, {command!r})"
    words = [sys.executable, "-c", begin]
    with subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True) as process:
        os.close(theirs)
        try:
            yield ours, process
        finally:
            process.kill()  # it has ended, unless the test has failed
    os.close(ours)


def shown_until(terminal: int, text: bytes) -> bytes:
    shown = b""
    while text not in shown:
        ready, _, _ = select.select([terminal], [], [], DEADLINE_S)
        assert ready, shown
        shown += os.read(terminal, 4096)
    return shown


def server_of(process: subprocess.Popen[bytes]) -> list[int]:
    """Descriptors of the processes of a chat's server."""
    (server,) = _children(process.pid)
    return [os.pidfd_open(pid) for pid in [server, *_children(server)]]


def wait_for_ends(processes: list[int]) -> None:
    for process in processes:
        assert select.select([process], [], [], DEADLINE_S)[0]
        os.close(process)


def test_no_process_is_left_when_a_chat_is_killed():
    with in_a_terminal() as (terminal, process):
        shown = shown_until(terminal, b"> ")
        assert b"starting a server for" in shown and b"a server of this chat's own" in shown
        ends = server_of(process)
        process.send_signal(signal.SIGKILL)
        wait_for_ends(ends)
    assert len(ends) > 1


@pytest.mark.slow
def test_ctrl_c_at_the_prompt_drops_the_line_and_twice_ends_the_chat_and_its_server():
    with in_a_terminal() as (terminal, process):
        shown_until(terminal, b"> ")
        ends = server_of(process)
        os.write(terminal, b"a line that is dropped\x03")
        shown_until(terminal, b"Ctrl-C once more, or Ctrl-D, leaves.\r\n> ")
        os.write(terminal, b"Hello\n")  # the server has lived on, and two Ctrl-C must follow each other
        assert b"quire chat:" not in shown_until(terminal, b"\n> ")
        os.write(terminal, b"\x03")
        shown_until(terminal, b"leaves.\r\n> ")
        assert all(not select.select([end], [], [], 0)[0] for end in ends)
        os.write(terminal, b"\x03")
        assert process.wait(DEADLINE_S) == 0
        wait_for_ends(ends)


EARLY = """
import _thread, readline, sys
from quire.frontend.cli.chat import typed_lines
readline.set_pre_input_hook(_thread.interrupt_main)  # the prompt is there, and input() does not wait for keys yet
print(list(typed_lines(sys.stdout)))
"""


def test_ctrl_c_just_before_input_waits_for_a_key_is_seen():
    pytest.importorskip("readline")
    with in_a_terminal([sys.executable, "-c", EARLY]) as (terminal, process):
        assert b"> \r\nCtrl-C once more, or Ctrl-D, leaves.\r\n> \r\n[None]" in shown_until(terminal, b"]")
        assert process.wait(DEADLINE_S) == 0


def test_ctrl_c_while_the_server_starts_ends_both():
    with in_a_terminal() as (terminal, process):
        shown_until(terminal, b"starting a server for")
        ends = server_of(process)
        os.write(terminal, b"\x03")
        assert process.wait(DEADLINE_S) == 130
        wait_for_ends(ends)


def _children(pid: int) -> list[int]:
    return [int(word) for task in Path(f"/proc/{pid}/task").iterdir() for word in (task / "children").read_text().split()]


def test_a_server_that_cannot_start_says_why():
    command = [*COMMAND, "/no/model", "--url", unused_url(), "-q", "hi"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 1 and "quire serve: /no/model is neither a folder nor a hub id" in done.stderr


def test_flags_for_a_server_need_a_model():
    done = subprocess.run([*COMMAND, "--", "--seed", "3"], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 2 and "quire chat MODEL -- --seed" in done.stderr


@pytest.mark.parametrize(
    ("wanted", "used", "said"),
    [
        ("large", "large", ""),
        ("/models/small-1b", "small", ""),
        ("org/large", "large", ""),
        ("org/other", "small", "not org/other"),
    ],
)
def test_a_server_that_answers_is_used(reasoner, capsys, wanted, used, said):
    out = io.StringIO()
    assert chat(ChatOptions(url=reasoner, own_model=wanted), io.StringIO("hi"), out) == 0
    assert out.getvalue() == "hi\n" and [body["model"] for body in Reasoner.asked] == [used]
    err = capsys.readouterr().err
    assert said in err if said else not err


# --------------------------------------------------------------------------------------------------- in a terminal
def test_reasoning_is_dimmed_and_no_part_of_the_conversation(reasoner, monkeypatch):
    shown = talk(monkeypatch, ChatOptions(url=reasoner), "one", "two")
    assert shown.count("\033[2mhmm\033[0m\n\n") == 2 and "\033[0m\n\none\n" in shown
    roles = [(message["role"], message["content"]) for message in Reasoner.asked[-1]["messages"]]
    assert roles == [("user", "one"), ("assistant", "one"), ("user", "two")]


def test_commands_set_the_system_message_and_the_model(reasoner, monkeypatch):
    lines = [
        "/system be brief",
        "one",
        "/clear",
        "two",
        "/system",
        "three",
        "/model",
        "/model large",
        "four",
        "/model huge",
        "/nope",
    ]
    shown = talk(monkeypatch, ChatOptions(url=reasoner), *lines)
    systems = [[m["content"] for m in body["messages"] if m["role"] == "system"] for body in Reasoner.asked]
    assert systems == [["be brief"], ["be brief"], [], []]
    assert [body["model"] for body in Reasoner.asked] == ["small", "small", "small", "large"]
    assert (
        "there are small, large" in shown
        and "no model 'huge'; this chat is with large" in shown
        and "/nope is no command" in shown
    )


class Interrupted(Reasoner):
    """Ctrl-C comes before it lists its models, once it has answered a question."""

    def do_GET(self) -> None:
        if self.asked:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        super().do_GET()


def test_images_go_with_the_next_message(reasoner, monkeypatch, tmp_path, capsys):
    png = b"\x89PNG\r\n\x1a\n" + bytes(range(20))
    (tmp_path / "a b.png").write_bytes(png)
    (tmp_path / "a.jpg").write_bytes(b"\xff\xd8\xff" + png)
    (tmp_path / "text.png").write_bytes(b"no image")
    good, other = f"/image '{tmp_path}/a b.png'", f"/image {tmp_path}/a.jpg"
    wrong = [f"/image {tmp_path}/text.png", "/image /nowhere.png"]
    lines = [good, other, "one", "two", other, "/image", "three", *wrong, "four"]
    shown = talk(monkeypatch, ChatOptions(url=reasoner), *lines)
    assert "images with the next message: 2" in shown and "images with the next message: 0" in shown
    contents = [body["messages"][-1]["content"] for body in Reasoner.asked]
    first, *parts = contents[0]
    assert first == {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(png).decode()}"}}
    assert parts[0]["image_url"]["url"].startswith("data:image/jpeg;base64,") and parts[1] == {"type": "text", "text": "one"}
    assert contents[1:] == ["two", "three", "four"]
    assert Reasoner.asked[1]["messages"][0]["content"] == contents[0]  # it stays in the conversation
    said = capsys.readouterr().err
    assert "text.png is no image: JPEG" in said and "/nowhere.png: No such file" in said


def test_ctrl_c_stops_a_command_and_the_chat_goes_on(monkeypatch):
    Reasoner.asked.clear()
    with answering(http.server.HTTPServer(("127.0.0.1", 0), Interrupted)) as server:
        shown = talk(monkeypatch, ChatOptions(url=url_of(server)), "one", "/model", "two")
    assert shown.endswith("one\n\n\033[2mhmm\033[0m\n\ntwo\n") and len(Reasoner.asked) == 2


def test_a_message_may_have_several_lines(reasoner, monkeypatch):
    lines = ['"""one', "", ' two"""', "three\\", "four", '"""five"""', '"""', "/six", '"""']
    talk(monkeypatch, ChatOptions(url=reasoner), *lines)
    assert [body["messages"][-1]["content"] for body in Reasoner.asked] == ["one\n\n two", "three\nfour", "five", "/six"]


# -------------------------------------------------------------------------------------------------------------- TLS
@pytest.fixture
def over_tls(tmp_path: Path) -> Iterator[str]:
    """The URL of a server with a certificate for localhost; authority.pem in tmp_path signed it."""
    (tmp_path / "authority.pem").write_bytes(authority())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certified().write(tmp_path, "server"))

    class Quiet(http.server.ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            pass

        def finish_request(self, request, client_address) -> None:
            with context.wrap_socket(request, server_side=True) as wrapped:
                super().finish_request(wrapped, client_address)

    with answering(Quiet(("127.0.0.1", 0), Reasoner)) as server:
        yield f"https://localhost:{server.server_port}"


def test_tls_works_with_the_authority_of_the_certificate(over_tls, tmp_path):
    out = io.StringIO()
    assert chat(ChatOptions(url=over_tls, cacert=str(tmp_path / "authority.pem")), io.StringIO("hi"), out) == 0
    assert out.getvalue() == "hi\n"


def test_errors_of_tls_are_named(over_tls, reasoner, tmp_path, capsys):
    def error_of(**options) -> str:
        assert chat(ChatOptions(**options), io.StringIO("hi")) == 1
        return capsys.readouterr().err

    assert "with --cacert FILE" in error_of(url=over_tls)
    assert "write https://localhost" in error_of(url=over_tls.replace("https", "http"))
    assert "write http://127.0.0.1" in error_of(url=reasoner.replace("http", "https"))
    trusted = str(tmp_path / "authority.pem")
    assert "for another name than 127.0.0.1" in error_of(url=over_tls.replace("localhost", "127.0.0.1"), cacert=trusted)
    assert "--cacert is for https" in error_of(url=reasoner, cacert=trusted)
    assert "--cacert /no/file: No such file" in error_of(url=over_tls, cacert="/no/file")
    (tmp_path / "empty.pem").touch()
    assert "no certificate in PEM" in error_of(url=over_tls, cacert=str(tmp_path / "empty.pem"))

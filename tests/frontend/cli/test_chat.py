"""`quire chat`: piped and in a terminal, with servers of every kind, and Ctrl-C."""

import http.client
import http.server
import io
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from fake_core import FakeCore
from http_servers import answering, url_of
from served import (
    DEADLINE_S,
    ROOMY,
    Served,
    next_of,
    say,
    say_hi,
)
from terminals import Terminal, type_lines
from toy_tokenizers import byte_level

from quire.frontend.cli.api_address import ChatError
from quire.frontend.cli.api_client import ChatServer
from quire.frontend.cli.chat import ChatOptions, Conversation, chat
from quire.frontend.http.listener import bind
from quire.ipc.messages.frontend import Abort, AddRequest


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
    with FakeCore(say_hi, limits=ROOMY) as core, Served("--engine", core.address) as served:
        options = ChatOptions(url=served.url())
        out = io.StringIO()
        type_lines(monkeypatch, "hi", "", KeyboardInterrupt, "/clear", "again", "/exit")
        assert chat(options, Terminal(), out) == 0
        assert out.getvalue().count("hello world!\n") == 2
        first = [next_of(core, AddRequest).inputs.token_ids for _ in range(2)]
        assert first[0] != first[1] and len(first[1]) < 2 * len(first[0])  # nothing of "hi" is left after /clear
        out.truncate(0)
        type_lines(monkeypatch, "/help", "/clera all", "//etc", "/quit")
        assert chat(options, Terminal(), out) == 0
        assert "/clear        forget" in out.getvalue() and "/clera is no command: /help" in out.getvalue()
        assert out.getvalue().count("hello world!\n") == 1
        sent = np.frombuffer(next_of(core, AddRequest).inputs.token_ids, "<i4").tolist()
        assert "/etc" in byte_level().decode(sent) and "//etc" not in byte_level().decode(sent)
        served.end()
        type_lines(monkeypatch, "anyone?", EOFError)
        assert chat(ChatOptions(url=options.url, model="toy"), Terminal(), out) == 0
        assert "nobody answers" in capsys.readouterr().err


def test_chat_says_when_nobody_is_there(capsys):
    with bind("127.0.0.1", 0)[0] as unused:
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        assert chat(ChatOptions(url=url), io.StringIO("hi")) == 1
    err = capsys.readouterr().err
    assert "nobody answers" in err and "quire serve" in err and "quire chat MODEL" in err
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

    with answering(http.server.HTTPServer(("127.0.0.1", 0), Strange)) as server:
        url, out = url_of(server), io.StringIO()
        assert chat(ChatOptions(url=url), io.StringIO("hi"), out) == 1
        assert said in capsys.readouterr().err
        assert chat(ChatOptions(url=url, model="m"), io.StringIO("hi"), out) == 0 and out.getvalue() == "\n"


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

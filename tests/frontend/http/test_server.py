"""Whole processes over real sockets: `quire serve` attached to a fake core, the openai client, and every end."""

import contextlib
import http.client
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
from fake_core import FakeCore
from served import (
    DEADLINE_S,
    ROOMY,
    Served,
    address_of,
    next_of,
    request,
    say,
    say_hi,
    until_healthy,
    until_it_listens,
    wait_for_signal_handler,
)
from serving import until
from toy_tokenizers import byte_level

from quire.frontend.http.listener import bind
from quire.ipc.messages.frontend import Abort, AddRequest


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


def say_call_behind_thought(request: AddRequest, child: int) -> list[int]:
    return byte_level().encode('hm</think><tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>').ids


@pytest.mark.parametrize("frontends", ["1", "2"])
def test_parsers_of_tools_and_reasoning_are_chosen_by_flags(frontends):
    flags = ["--tool-call-parser", "hermes", "--reasoning-parser", "deepseek_r1", "--enable-auto-tool-choice"]
    with (
        FakeCore(say_call_behind_thought, limits=ROOMY) as core,
        Served("--engine", core.address, "--frontends", frontends, *flags) as served,
    ):
        body = {"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function", "function": {"name": "f"}}]}
        status, answer = request(served.url(), "POST", "/v1/chat/completions", body)
        message = json.loads(answer)["choices"][0]["message"]
        assert status == 200 and message["reasoning"] == "hm" and message["content"] is None
        assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
        assert served.end()[0] == 0


def test_a_client_that_leaves_ends_its_request_in_the_core():
    with FakeCore() as core, Served("--engine", core.address) as served:
        url = served.url()
        connection = http.client.HTTPConnection(url.removeprefix("http://"))
        body = json.dumps({"prompt": [1, 2], "max_tokens": 10})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        added = next_of(core, AddRequest)
        connection.close()
        assert next_of(core, Abort).ids == [added.id]


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


def test_health_follows_the_heartbeat():
    with FakeCore(say_hi) as core, Served("--engine", core.address) as served:
        url = served.url()
        core.announce(oldest_step_s=61.0)
        until_healthy(url, 503)
        core.announce(oldest_step_s=0.0)
        until_healthy(url, 200)
        core.announce(ready=False)
        until_healthy(url, 503)


def until_nobody_is_let_in(url: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        assert time.monotonic() < deadline
        with contextlib.suppress(ConnectionError), socket.create_connection(address_of(url)):
            continue
        return


def test_a_stop_lets_a_response_in_the_background_end_first(tmp_path):
    with FakeCore(limits=ROOMY) as core, Served("--engine", core.address, "--files-dir", str(tmp_path)) as served:
        url, body = served.url(), {"input": "hi", "background": True, "max_output_tokens": 1}
        status, begun = request(url, "POST", "/v1/responses", body)
        key = next_of(core, AddRequest).id << 8
        served.process.send_signal(signal.SIGTERM)
        until_nobody_is_let_in(url)
        say(core, key, 70, "length")
        code, err = served.wait()
        assert status == 200 and code == 0 and "in the background to end: 1" in err, err
    with FakeCore(limits=ROOMY) as core, Served("--engine", core.address, "--files-dir", str(tmp_path)) as served:
        status, found = request(served.url(), "GET", f"/v1/responses/{json.loads(begun)['id']}")
        assert status == 200 and json.loads(found)["usage"]["output_tokens"] == 1


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
        until_nobody_is_let_in(url)
        say(core, key, 71, "length")
        rest = response.read()
        assert first.startswith(b"data: {") and rest.endswith(b"data: [DONE]\n\n")
        assert served.wait()[0] == 0
        connection.close()


def test_several_frontends_share_a_port_and_their_metrics():
    with FakeCore(say_hi) as core, Served("--engine", core.address, "--frontends", "2") as served:
        url = served.url()
        for _ in range(12):
            assert request(url, "POST", "/v1/completions", {"prompt": "a"})[0] == 200
        counted = 'http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 12.0'
        core.announce(generation_tokens=7)
        for _ in range(8):  # whichever of them answers
            text = until_shown(url, 'vllm:generation_tokens_total{model_name="toy",engine="0"} 7.0')
            assert counted in until_shown(url, counted)  # an answer is counted when it was sent
            for name in ("frontend-0", "frontend-1", "server"):
                assert f'process_resident_memory_bytes{{process="{name}"}}' in text
        process = psutil.Process(served.process.pid)
        first = min(process.children(), key=psutil.Process.create_time)
        first.kill()
        assert counted in request(url, "GET", "/metrics")[1].decode()  # what the dead one has counted, too
        until(lambda: first not in process.children() and len(process.children()) == 2)
        code, err = served.end()
        assert (
            code == 0
            and "frontend process 0 ended unexpectedly (signal SIGKILL); others take its connections; next start in 0 s" in err
        ), err


def until_shown(url: str, line: str) -> str:
    """/metrics, once it holds this line."""
    text = ""

    def is_shown() -> bool:
        nonlocal text
        text = request(url, "GET", "/metrics")[1].decode()
        return line in text

    until(is_shown)
    return text


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

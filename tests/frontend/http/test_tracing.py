"""Spans of requests: what a collector receives, over real HTTP, and that one that is down is nobody's affair."""

import asyncio
import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator

import fake_client as http_api
import pytest
from deadlines import DEADLINE_S
from fake_client import CHAT, COMPLETIONS, HELLO, NUM_TOKENS
from fake_core import FakeCore
from http_servers import answering, url_of
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from served import Served, request, say_hi

from quire.frontend.client.stream import EngineError
from quire.frontend.http.api.logs import tracing
from quire.frontend.http.api.logs.tracing import MAX_PROMPTS, TracedApp, TracingError, check_endpoint
from quire.frontend.http.server_state import ServerState

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector(http.server.ThreadingHTTPServer):
    """Keeps what it is sent."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Receiver)
        self.paths: list[str] = []
        self.services: list[str] = []
        self.spans: list = []

    @property
    def url(self) -> str:
        return url_of(self)

    def of(self, name: str) -> list:
        return [span for span in self.spans if span.name == name]


class Receiver(http.server.BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        self.server.paths.append(self.path)
        message = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
        for resource in message.resource_spans:
            self.server.services += [a.value.string_value for a in resource.resource.attributes if a.key == "service.name"]
            self.server.spans += [span for scope in resource.scope_spans for span in scope.spans]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with answering(Collector()) as server:
        yield server


def traced_api(endpoint: str) -> http_api.Api:
    api = http_api.Api()
    api.app = TracedApp(api.app, api.app._services, endpoint)
    return api


def attributes(span) -> dict[str, object]:
    found = {}
    for item in span.attributes:
        kind = item.value.WhichOneof("value")
        value = getattr(item.value, kind)
        found[item.key] = [v.string_value for v in value.values] if kind == "array_value" else value
    return found


def test_a_request_is_a_span_in_its_clients_trace(collector):
    async def main():
        api = traced_api(collector.url)
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1", "X-Request-Id": "mine"}
        body = {**HELLO, "n": 2, "max_tokens": 50, "temperature": 0.5, "top_p": 0.9}
        await api.ask("POST", CHAT, body, headers)
        await api.app.close()

    asyncio.run(main())
    assert collector.paths == ["/v1/traces"] and collector.services == ["quire"]
    (span,) = collector.of("llm_request")
    assert (span.trace_id.hex(), span.parent_span_id.hex(), span.trace_state) == (TRACE, PARENT, "vendor=1")
    assert span.kind == span.SPAN_KIND_SERVER
    found = attributes(span)
    latencies = {key.removeprefix("gen_ai.latency."): found.pop(key) for key in list(found) if "latency" in key}
    assert found == {
        "http.route": CHAT, "http.request.method": "POST", "http.response.status_code": 200,
        "gen_ai.request.id": "chatcmpl-mine", "gen_ai.response.id": "chatcmpl-mine", "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny", "gen_ai.request.n": 2, "gen_ai.request.temperature": 0.5, "gen_ai.request.top_p": 0.9,
        "gen_ai.request.max_tokens": 50, "gen_ai.usage.num_sequences": 2, "gen_ai.usage.prompt_tokens": 19,
        "gen_ai.usage.input_tokens": 19, "gen_ai.usage.completion_tokens": 2 * NUM_TOKENS,
        "gen_ai.usage.output_tokens": 2 * NUM_TOKENS, "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.response.finish_reasons": ["stop", "stop"],
    }  # fmt: skip
    assert set(latencies) == {
        "e2e",
        "time_to_first_token",
        "time_in_queue",
        "time_in_model_prefill",
        "time_in_model_decode",
        "time_in_model_inference",
    }
    assert all(0 <= value < 60 for value in latencies.values())
    children = [collector.of(name)[0] for name in ("queue", "prefill", "decode")]
    for child in children:
        assert child.trace_id.hex() == TRACE and child.parent_span_id == span.span_id
        assert span.start_time_unix_nano <= child.start_time_unix_nano <= child.end_time_unix_nano <= span.end_time_unix_nano
    assert [c.end_time_unix_nano for c in children[:2]] == [c.start_time_unix_nano for c in children[1:]]


@pytest.mark.parametrize("header", [None, "nonsense", f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{PARENT}"])
def test_without_a_clients_trace_there_is_one_of_its_own(collector, header):
    async def main():
        api = traced_api(f"{collector.url}/v1/traces")
        await api.ask("POST", CHAT, {**HELLO, "stream": True}, {"traceparent": header} if header else None)
        await api.app.close()

    asyncio.run(main())
    (span,) = collector.of("llm_request")
    assert span.trace_id.hex() != TRACE and span.parent_span_id == b""


def test_a_client_that_does_not_want_to_be_traced_is_not(collector):
    async def main():
        api = traced_api(collector.url)
        await api.ask("POST", CHAT, HELLO, {"traceparent": f"00-{TRACE}-{PARENT}-00"})
        await api.ask("GET", "/v1/models")
        await api.ask("POST", CHAT, {**HELLO, "n": 0})
        await api.app.close()

    asyncio.run(main())
    assert collector.spans == []


def test_many_prompts_are_one_span_and_few_phases(collector):
    async def main():
        api = traced_api(collector.url)
        await api.ask("POST", COMPLETIONS, {"prompt": ["a"] * (MAX_PROMPTS + 3), "max_tokens": 30})
        await api.app.close()

    asyncio.run(main())
    (span,) = collector.of("llm_request")
    assert attributes(span)["gen_ai.usage.num_sequences"] == MAX_PROMPTS + 3
    assert len(collector.of("decode")) == MAX_PROMPTS


def test_a_failure_and_a_client_that_leaves_are_seen(collector):
    async def main():
        api = traced_api(collector.url)
        api.client.speak = lambda stream: stream.end(EngineError("a worker died"))
        await api.ask("POST", CHAT, HELLO)
        api.client.speak = None
        wire = api.wire()
        await wire.talk(api.encode("POST", CHAT, HELLO))
        wire.connection.connection_lost(None)
        await asyncio.sleep(0)
        await api.app.close()

    asyncio.run(main())
    failed, left = collector.of("llm_request")
    assert failed.status.code == failed.status.STATUS_CODE_ERROR and failed.status.message == "a worker died"
    assert attributes(failed)["error.type"] == "EngineError" and attributes(failed)["http.response.status_code"] == 500
    assert attributes(failed)["gen_ai.response.finish_reasons"] == ["error"]
    assert attributes(left)["gen_ai.response.finish_reasons"] == ["abort"]
    assert len(collector.of("queue")) == 2 and not collector.of("decode")


def test_what_runs_in_the_background_is_one_span_when_it_is_over(collector):
    async def main():
        api = traced_api(collector.url)
        api.client.speak = None
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        status, begun = await api.json("POST", "/v1/responses", {"input": "hi", "background": True}, headers)
        assert status == 200
        task = api.services.state.background[begun["id"]]
        api.client.say_output(api.client.streams[0])
        await asyncio.wait([task])
        await api.services.storage.close()
        await api.app.close()

    asyncio.run(main())
    (span,) = collector.of("llm_request")
    assert span.trace_id.hex() == TRACE and attributes(span)["http.response.status_code"] == 200
    assert attributes(span)["gen_ai.usage.completion_tokens"] == NUM_TOKENS and len(collector.of("decode")) == 1


@pytest.fixture
def threads_end() -> Iterator[None]:
    """What still tries to send would draw random pauses in the middle of other tests."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), thread


@pytest.mark.usefixtures("threads_end")
def test_a_dead_collector_costs_spans_and_no_time(monkeypatch, caplog):
    monkeypatch.setattr(tracing, "LAST_EXPORT_S", 0.05)
    monkeypatch.setattr(tracing, "EXPORT_TIMEOUT_S", 0.2)

    async def main():
        api = traced_api("http://127.0.0.1:9")  # nobody is there
        for _ in range(3):
            assert (await api.ask("POST", CHAT, HELLO)).status == 200
        await asyncio.wait_for(api.app.close(), 5.0)

    asyncio.run(main())
    assert len([r for r in caplog.records if "opentelemetry" in r.name]) == 0


def test_what_cannot_work_is_said_at_the_start(monkeypatch):
    for endpoint in ("grpc://localhost:4317", "localhost:4317", "http://"):
        with pytest.raises(TracingError, match="over HTTP"):
            check_endpoint(endpoint)
    check_endpoint(None)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(TracingError, match=r"pip install '\.\[otlp\]'"):
        check_endpoint("http://localhost:4318")


def test_without_the_flag_nothing_of_it_is_imported():
    code = "import sys, quire.frontend.cli.serve; sys.exit(any(m.startswith('opentelemetry') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_served_request_is_traced(collector):
    with FakeCore(say_hi) as core, Served("--engine", core.address, "--otlp-traces-endpoint", collector.url) as served:
        assert request(served.url(), "POST", "/v1/completions", {"prompt": "a", "max_tokens": 20})[0] == 200
        assert served.end()[0] == 0
    (span,) = collector.of("llm_request")
    assert attributes(span)["gen_ai.usage.completion_tokens"] == len(say_hi(None, 0)) and len(collector.of("decode")) == 1


def test_a_server_that_cannot_trace_does_not_start():
    with Served("--engine", "ipc:///nowhere", "--otlp-traces-endpoint", "grpc://localhost:4317") as served:
        code, err = served.wait()
    assert code == 1 and err.splitlines()[-1].startswith("quire serve: --otlp-traces-endpoint grpc://localhost:4317: OTLP goes")


def test_it_is_an_application(collector):
    async def main():
        api = traced_api(collector.url)
        ServerState(api.app)
        assert (await api.ask("GET", "/nowhere")).status == 404
        await api.app.close()

    asyncio.run(main())

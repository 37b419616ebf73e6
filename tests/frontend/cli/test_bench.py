"""`quire bench`: prompts, arrival times and figures by themselves; a whole run against a server that answers on cue."""

import asyncio
import http.server
import io
import json
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from deadlines import DEADLINE_S
from http_servers import answering, url_of
from toy_tokenizers import byte_level

from quire.enginecore.loading.model_files import BUNDLED
from quire.frontend.cli import main as cli
from quire.frontend.cli.bench import datasets, serve
from quire.frontend.cli.bench.datasets import DatasetError
from quire.frontend.cli.bench.metrics import Result, outcome, report, summary
from quire.frontend.cli.bench.progress import Progress
from quire.frontend.cli.bench.serve import due_times
from quire.frontend.cli.bench.sse_client import Target

# keys of the files that `vllm bench serve --save-result` writes, read by many scripts
VLLM_KEYS = {
    "date", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate", "burstiness", "max_concurrency",
    "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput",
    "output_throughput", "total_token_throughput", "max_output_tokens_per_s", "max_concurrent_requests",
    *(f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl")),
}  # fmt: skip
DETAILED = {"input_lens", "output_lens", "ttfts", "itls", "generated_texts", "errors"}


class Streams(http.server.ThreadingHTTPServer):
    """An OpenAI-compatible server: each answer has as many pieces as were asked for. It keeps the bodies."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[dict] = []
        self.headers: list[dict] = []
        self.not_ready = 0  # so many requests first get a proxy's 503
        self.metrics: list[str] = []  # the next answers of /metrics
        self.holding, self.release = threading.Event(), threading.Event()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Streams

    def do_GET(self) -> None:
        self.server.headers.append(dict(self.headers))
        if self.server.not_ready:
            self.server.not_ready -= 1
            return self._answer(503, "text/html", b"<html>wait</html>")
        if self.path == "/metrics" and self.server.metrics:
            return self._answer(200, "text/plain", self.server.metrics.pop(0).encode())
        self._answer(200, "application/json", b'{"data": [{"id": "m", "max_model_len": 100}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        self.server.headers.append(dict(self.headers))
        if body.get("prompt") == "refuse me":
            return self._answer(400, "application/json", b'{"error": {"message": "no"}}')
        if body.get("prompt") == "hold me":
            self.server.holding.set()
            self.server.release.wait(DEADLINE_S)
            return None
        chat = "messages" in body
        count = body["max_completion_tokens" if chat else "max_tokens"]
        piece = {"delta": {"content": "x"}} if chat else {"text": "x"}
        events = [{"choices": [{"index": 0, **piece, "finish_reason": None}]}] * count
        events += [{"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": count}}]
        data = b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events) + b"data: [DONE]\n\n"
        return self._answer(200, "text/event-stream", data)

    def _answer(self, status: int, kind: str, data: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def streams():
    with answering(Streams()) as server:
        try:
            yield server
        finally:
            server.release.set()


def bench(server: Streams, *words: str) -> int:
    return cli.main(["bench", "serve", "--base-url", f"http://127.0.0.1:{server.server_port}", "--disable-tqdm", *words])


def counters(drafts: int, tokens: int, *by_place: int) -> str:
    """A server's text with vLLM's counters of drafts, those of two engines."""
    place = "spec_decode_num_accepted_tokens_per_pos"
    families = {
        "num_requests_running": 3.0,
        "spec_decode_num_drafts_total": drafts,
        "spec_decode_num_draft_tokens_total": tokens,
    }
    lines = [f'vllm:{name}{{model_name="m",engine="{e}"}} {n}' for name, n in families.items() for e in (0, 1)]
    lines += [
        f'vllm:{place}_total{{model_name="m",engine="{e}",position="{i}"}} {float(n)}'
        for i, n in enumerate(by_place)
        for e in (0, 1)
    ]
    return "\n".join(["# TYPE vllm:spec_decode_num_drafts_total counter", *lines, ""])


def test_a_server_that_speculates_says_how_drafts_fared(streams, tmp_path, capsys):
    streams.metrics = [counters(100, 300, 70, 50, 50), counters(110, 330, 78, 52, 50)]
    saved = ("--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json")
    assert bench(streams, "--num-prompts", "2", "--random-input", "5", "--random-output", "4", *saved) == 0
    said = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    start = next(i for i, line in enumerate(said) if "Speculative Decoding" in line)
    assert said[start + 1 : start + 9] == [
        "Acceptance rate (%): 33.33", "Acceptance length: 2.00", "Drafts: 20", "Draft tokens: 60", "Accepted tokens: 20",
        "Position 0 acceptance (%): 80.00", "Position 1 acceptance (%): 20.00", "Position 2 acceptance (%): 0.00",
    ]  # fmt: skip
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["spec_decode_acceptance_length"] == 2.0
    assert found["spec_decode_per_position_acceptance_rates"] == [0.8, 0.2, 0.0]
    assert streams.metrics == []


def test_a_run_and_its_file(streams, tmp_path, capsys):
    where = ("--save-result", "--save-detailed", "--result-dir", str(tmp_path / "new"), "--result-filename", "r.json")
    load = (
        "--num-prompt",
        "12",
        "--random-input",
        "5",
        "--random-output",
        "4",
        "--random-range-ratio",
        "0.5",
        "--max-concurrency",
        "3",
    )
    more = ("--num-warmups", "2", "--metadata", "a=b", "--header", "X-One=two", "--goodput", "ttft:100000", "--ignore-eos",
            "--trust-remote-code", "--repetition-penalty", "1.5",
            "--temperature", "0", "--extra-body", '{"min_tokens": 1}', "--api-key", "k", "--request-rate", "5000")  # fmt: skip
    assert bench(streams, *load, *where, *more) == 0
    found = json.loads((tmp_path / "new" / "r.json").read_text())
    assert VLLM_KEYS | DETAILED | {"a"} <= set(found) and not any(key.startswith("spec_decode") for key in found)
    assert (found["completed"], found["failed"], found["model_id"]) == (12, 0, "m")
    assert found["total_input_tokens"] == 12 * 7 and found["total_output_tokens"] == sum(found["output_lens"])
    assert found["request_goodput"] == found["request_throughput"] > 0 and found["max_concurrent_requests"] <= 3
    assert [len(text) for text in found["generated_texts"]] == found["output_lens"]
    assert len(streams.bodies) == 1 + 2 + 12
    body = streams.bodies[-1]
    assert (
        body["min_tokens"] == 1
        and body["ignore_eos"] is True
        and body["temperature"] == 0
        and body["repetition_penalty"] == 1.5
        and body["model"] == "m"
    )
    assert all(isinstance(i, int) for i in body["prompt"]) and {2, 3, 4, 5, 6} >= {b["max_tokens"] for b in streams.bodies}
    assert streams.headers[-1]["X-One"] == "two" and streams.headers[-1]["Authorization"] == "Bearer k"
    out = capsys.readouterr().out
    assert "Successful requests:                     12" in out and "P99 TTFT (ms):" in out and "Request goodput" in out


def test_chats_and_files_of_prompts(streams, tmp_path, capsys):
    assert bench(streams, "--backend", "openai-chat", "--num-prompts", "2", "--output-len", "3", "--percentile-metrics", "e2el",
                 "--metric-percentiles", "50,99.9") == 0  # fmt: skip
    assert streams.bodies[-1]["messages"][0]["role"] == "user" and streams.bodies[-1]["max_completion_tokens"] == 3
    assert "P99.9 E2EL (ms):" in capsys.readouterr().out
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": "hello", "output_tokens": 2}\n{"prompt": "refuse me"}\n')
    assert bench(streams, "--dataset-name", "custom", "--dataset-path", str(lines), "--num-prompts", "4") == 1
    said = capsys.readouterr()
    assert "Failed requests:                         2" in said.out and "failed: 400" in said.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--dataset-name", "sharegpt"], "needs --dataset-path"),
        (["--dataset-name", "sharegpt", "--dataset-path", "/nowhere"], "needs --tokenizer"),
        (["--dataset-name", "custom", "--dataset-path", "/nowhere"], "/nowhere"),
        (["--goodput", "speed:3"], "ttft:500"), (["--percentile-metrics", "x"], "ttft, tpot"),
        (["--request-rate", "0"], "greater"),
        (["--metric-percentiles", "101"], "percentiles"), (["--header", "x"], "NAME=VALUE"),
        (["--num-prompts", "0"], "at least 1"),
        (["--tokenizer", "/nowhere/at/all"], "--tokenizer"),
        (["--request-rate", "nan"], "no number greater than 0"), (["--burstiness", "x"], "no number greater than 0"),
        (["--max-concurrency", "-1"], "--max-concurrency: '-1'"), (["--random-prefix-len", "-1"], "at least 0"),
        (["--seed", "-1"], "--seed"), (["--random-range-ratio", "x"], "between 0 and 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured(streams, words, said, capsys):
    try:
        code = bench(streams, *words)
    except SystemExit as end:
        code = end.code
    assert code in (1, 2) and said in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_said_before_anything_is_measured(streams, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert bench(streams, "--num-prompts", "1", "--save-result", "--result-dir", str(tmp_path / "file" / "in")) == 1
    assert "file/in" in capsys.readouterr().err and not streams.bodies
    assert cli.main(["bench", "throughput", "--output-json", str(tmp_path / "no" / "x.json")]) == 1
    assert "no/x.json cannot be written" in capsys.readouterr().err


def test_a_server_that_starts_is_waited_for(streams, capsys, monkeypatch):
    monkeypatch.setattr(serve, "ASK_AGAIN_S", 0.0)
    monkeypatch.setenv("OPENAI_API_KEY", "the environment's")
    small = ("--num-prompts", "1", "--input-len", "2", "--output-len", "2", "--header", "Authorization=Basic x")
    streams.not_ready = 2
    assert bench(streams, *small) == 1
    assert "the server answers with HTTP status 503" in capsys.readouterr().err
    assert bench(streams, *small, "--ready-check-timeout-sec", "60", "--endpoint", "v1/completions") == 0
    assert {headers["Authorization"] for headers in streams.headers} == {"Basic x"} and streams.not_ready == 0


def test_ctrl_c_tells_what_there_is(streams, tmp_path):
    lines = tmp_path / "prompts.jsonl"  # a line break of Unicode's is none of the file's
    lines.write_text("".join(json.dumps({"prompt": text}, ensure_ascii=False) + "\n" for text in ("a\u2028b", "c", "hold me")))
    command = [sys.executable, "-m", "quire", "bench", "serve", "--base-url", url_of(streams), "--dataset-name", "custom",
               "--dataset-path", str(lines), "--num-prompts", "3", "--max-concurrency", "1", "--output-len", "2"]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as measuring:
        assert streams.holding.wait(DEADLINE_S)
        measuring.send_signal(signal.SIGINT)
        out, err = measuring.communicate(timeout=DEADLINE_S)
    assert measuring.returncode == 130 and "Successful requests:                     2" in out
    assert "interrupted: figures of 2 requests, of 3" in err and "Traceback" not in err


def test_nobody_answers(capsys):
    assert cli.main(["bench", "serve", "--port", "1", "--model", "m", "--num-prompts", "2", "--disable-tqdm"]) == 1
    assert "the first request failed: cannot connect" in capsys.readouterr().err


def test_what_there_is_to_measure(capsys):
    assert cli.main(["bench"]) == 2
    out = capsys.readouterr().out
    assert all(kind in out for kind in ("serve", "throughput", "latency", "startup"))


def test_an_engine_is_named_as_for_vllm(capsys):
    for measure in ("throughput", "latency", "startup"):
        with pytest.raises(SystemExit):
            cli.main(["bench", measure, "one", "--model", "another"])
        assert f"bench {measure}: the model is given twice" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------- its parts
def test_random_prompts_follow_from_the_seed():
    first, second = (datasets.random_requests(50, 20, 10, range_ratio=0.5, prefix_len=3, seed=5) for _ in range(2))
    assert first == second != datasets.random_requests(50, 20, 10, range_ratio=0.5, prefix_len=3, seed=6)
    assert all(10 <= r.prompt_len - 3 <= 30 and 5 <= r.output_len <= 15 and len(r.prompt) == r.prompt_len for r in first)
    assert len({tuple(r.prompt[:3]) for r in first}) == 1 and len({r.prompt_len for r in first}) > 5
    words = datasets.random_requests(1, 20, 10, as_words=True)[0]
    assert len(words.prompt.split()) == 20


def test_texts_have_the_length_that_their_tokenizer_counts():
    tokenizer = byte_level()
    for request in datasets.random_requests(5, 30, 4, tokenizer=tokenizer):
        assert request.prompt_len == len(tokenizer.encode(request.prompt, add_special_tokens=False).ids)


def test_conversations_of_a_sharegpt_file(tmp_path):
    tokenizer, path = byte_level(), tmp_path / "sharegpt.json"

    def talk(*texts):
        return {"conversations": [{"from": "human", "value": text} for text in texts]}

    path.write_text(
        json.dumps([talk("x" * 50, "y" * 20), talk("only one"), talk("hi", "ho"), {"no": 1}, talk("z" * 5000, "a" * 9)])
    )
    found = datasets.sharegpt_requests(str(path), 3, None, 0, tokenizer)
    assert [r.prompt for r in found] == ["x" * 50] * 3 and found[0].output_len == len(tokenizer.encode("y" * 20).ids)
    assert datasets.sharegpt_requests(str(path), 1, 99, 0, tokenizer)[0].output_len == 99
    path.write_text("[]")
    with pytest.raises(DatasetError, match="no prompt that can be used"):
        datasets.sharegpt_requests(str(path), 1, None, 0, tokenizer)


def test_arrival_times():
    assert due_times(3, float("inf"), 1.0, 0) == [0.0] * 3
    poisson, even = (np.diff(due_times(4000, 10.0, burstiness, 1)) for burstiness in (1.0, 100.0))
    assert poisson.mean() == pytest.approx(0.1, rel=0.1) == even.mean() and poisson.std() > 5 * even.std()


def test_figures():
    results = [Result(0.0, 0.1, 0.5, [0.2, 0.2], 10, 3), Result(1.0, 1.3, 1.3, [], 20, 1), Result(1.0, 0, 0, [], 5, 0, "lost")]
    found = summary(results, 2.0, ["ttft", "tpot", "itl", "e2el"], [50, 99], {"ttft": 200})
    assert (found["completed"], found["failed"]) == (2, 1)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (30, 4)
    assert (found["request_throughput"], found["request_goodput"], found["output_throughput"]) == (1.0, 0.5, 2.0)
    assert found["mean_ttft_ms"] == pytest.approx(200) and found["median_e2el_ms"] == pytest.approx(400)
    assert found["mean_tpot_ms"] == pytest.approx(200) and found["std_itl_ms"] == pytest.approx(0)
    assert found["max_concurrent_requests"] == 1 and found["max_output_tokens_per_s"] == pytest.approx(3)
    assert "Total generated tokens:                  4" in report(found, ["ttft"], [50])
    nothing = summary(results[2:], 0.0, ["ttft"], [99], {})
    assert nothing["completed"] == 0 and nothing["request_goodput"] is None and nothing["p99_ttft_ms"] == 0.0


def test_servers_behind_tls_and_beneath_a_path():
    assert Target.of("https://host/api/v1", "/v1/completions")[:3] == ("host", 443, "/api/v1/completions")
    assert Target.of("https://host", "/x").secure is not None and Target.of("http://host", "/x").secure is None
    with pytest.raises(ValueError, match="an URL like"):
        Target.of("ftp://host", "/x")


# ------------------------------------------------------------------------------------------------- engines of our own
SMALL = ("--device", "cpu", "--max-model-len", "64", "--max-num-seqs", "4", "--cpu-kv-cache-gib", "0.01")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("measure", "words", "keys"),
    [
        ("throughput", ("--num-prompts", "4", "--input-len", "8", "--output-len", "4", "--disable-tqdm"),
         {"elapsed_time", "num_requests", "total_num_tokens", "requests_per_second", "tokens_per_second"}),
        ("latency", ("--num-iters", "2", "--num-iters-warmup", "1", "--input-len", "8", "--output-len", "4"),
         {"avg_latency", "latencies", "percentiles"}),
        ("startup", ("--num-iters-cold", "0", "--num-iters-warm", "1"), {"avg_warm_startup_time", "warm_startup_times"}),
    ],
)  # fmt: skip
def test_measures_of_an_engine(measure, words, keys, tmp_path, capsys):
    asyncio.set_event_loop(None)
    path = tmp_path / "found.json"
    vllms = ["--model", str(BUNDLED), "-O2", "--trust-remote-code"]
    assert cli.main(["bench", measure, *SMALL, *words, *vllms, "--output-json", str(path)]) == 0
    assert "no code of a checkpoint is ever run" in capsys.readouterr().err
    assert keys <= set(json.loads(path.read_text()))


def test_refused_requests_are_told_apart_from_others_that_failed():
    errors = ("", "503: {}", "429: {}", "529: {}", "504: {}", "400: {}", "cannot connect: refused")
    results = [Result(0.0, 1.0, 2.0, [1.0], 5, 0 if error else 2, error) for error in errors]
    found = summary(results, 2.0, ("ttft",), (99.0,), {})
    assert (found["completed"], found["failed"], found["refused"]) == (1, 6, 3)
    assert "Refused requests:                        3" in report(found, ("ttft",), (99.0,))
    assert outcome(found) == "7 requests: 1 completed, 6 failed, 3 of them refused (503, 429)"


def test_progress_is_lines_where_there_is_no_terminal():
    class Log(io.StringIO):
        said = asyncio.Event()

        def write(self, text: str) -> int:
            if "2 of 9" in text:
                self.said.set()
            return super().write(text)

    async def run(log: Log) -> None:
        with Progress(9, False, log, line_s=0.001) as progress:
            progress.add(Result(0.0, 1.0, 2.0, [], 1, 1))
            progress.add(Result(0.0, 1.0, 2.0, [], 1, 0, "503: {}"))
            await log.said.wait()
        with Progress(9, True, log):
            await asyncio.sleep(0)

    log = Log()
    asyncio.run(run(log))
    assert "quire bench serve: 0 s: 2 of 9 requests done, 1 failed (1 refused)\n" in log.getvalue()

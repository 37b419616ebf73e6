"""`quire bench serve` of vectors and scores: bodies as `vllm bench serve` sends them, figures, and a run against a server."""

import http.server
import json
from collections.abc import Iterator

import pytest
from http_servers import answering
from serving import SMALL, Served
from toy_tokenizers import byte_level

from quire.frontend.cli import main as cli
from quire.frontend.cli.bench import pooling
from quire.frontend.cli.bench.datasets import DatasetError, Request, random_requests
from quire.ipc.bundled import EMBEDDER

# keys of vLLM's result files of pooling backends
VLLM_KEYS = {"duration", "completed", "failed", "total_input_tokens", "request_throughput", "total_token_throughput",
             "mean_e2el_ms", "median_e2el_ms", "std_e2el_ms", "p99_e2el_ms"}  # fmt: skip


class Numbers(http.server.ThreadingHTTPServer):
    """A server of vectors and scores, which keeps paths and bodies."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[tuple[str, dict]] = []
        self.answer = b'{"data": [], "usage": {"prompt_tokens": 9, "total_tokens": 9}}'


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Numbers

    def do_GET(self) -> None:
        self._send(b'{"data": [{"id": "m"}]}')

    def do_POST(self) -> None:
        self.server.asked.append((self.path, json.loads(self.rfile.read(int(self.headers["content-length"])))))
        self._send(self.server.answer)

    def _send(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def numbers() -> Iterator[Numbers]:
    with answering(Numbers()) as server:
        yield server


def bench(url: str, *words: str) -> int:
    return cli.main(["bench", "serve", "--base-url", url, "--disable-tqdm", *words])


def asked(numbers: Numbers, *words: str) -> list[tuple[str, dict]]:
    """The requests of the load itself, without the first one."""
    numbers.asked.clear()
    assert bench(f"http://127.0.0.1:{numbers.server_port}", *words) == 0
    return numbers.asked[1:]


def test_requests_are_those_of_vllms_backends(numbers: Numbers) -> None:
    small = ("--num-prompts", "5", "--random-input-len", "12", "--max-concurrency", "1")
    found = asked(numbers, "--backend", "openai-embeddings", *small)
    assert len(found) == 5 and {path for path, _ in found} == {"/v1/embeddings"}
    assert all(set(body) == {"model", "input", "truncate_prompt_tokens"} and len(body["input"]) == 12 for _, body in found)
    found = asked(numbers, "--backend", "openai-embeddings", "--random-batch-size", "2", *small)
    assert [[len(ids) for ids in body["input"]] for _, body in found] == [[12, 12], [12, 12], [12]]
    ((_, body), *_) = asked(numbers, "--backend", "openai-embeddings-chat", *small)
    (message,) = body["messages"]
    assert len(message["content"][0]["text"].split()) == 12 and body["truncate_prompt_tokens"] == -1
    ((_, body), *_) = asked(numbers, "--backend", "infinity-embeddings", *small)
    assert set(body) == {"model", "input"}
    ((path, body), *_) = asked(numbers, "--backend", "vllm-pooling", "--extra-body", '{"task": "token_embed"}', *small)
    assert path == "/pooling" and body["task"] == "token_embed" and len(body["input"]) == 12
    rerank = ("--backend", "vllm-rerank", "--dataset-name", "random-rerank", "--random-batch-size", "2", *small)
    found = asked(numbers, *rerank)
    assert {path for path, _ in found} == {"/v1/rerank"} and len({body["query"] for _, body in found}) == 1
    assert [len(body["documents"]) for _, body in found] == [2, 2, 1]
    query, document = found[0][1]["query"], found[0][1]["documents"][0]
    assert (len(query.split()), len(document.split())) == (5, 6)  # with a separator between them 12 tokens
    found = asked(numbers, *rerank, "--no-reranker")
    assert [len(body["documents"]) for _, body in found] == [2, 2]  # the query is the fifth text
    assert len(found[0][1]["query"].split()) == len(found[0][1]["documents"][0].split()) == 12


def test_figures_are_those_of_whole_answers(numbers: Numbers, tmp_path, capsys) -> None:
    saved = ("--save-result", "--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "r.json")
    asked(numbers, "--backend", "openai-embeddings", "--num-prompts", "4", "--random-input-len", "3", *saved)
    found, out = json.loads((tmp_path / "r.json").read_text()), capsys.readouterr().out
    assert set(found) >= VLLM_KEYS and not {"total_output_tokens", "output_throughput", "mean_ttft_ms"} & set(found)
    assert found["total_input_tokens"] == 4 * 9 and found["input_lens"] == [9] * 4 and found["mean_e2el_ms"] > 0
    assert "Mean E2EL (ms):" in out and "TTFT" not in out and "generated tokens" not in out


def test_an_answer_that_is_none_fails(numbers: Numbers, capsys) -> None:
    numbers.answer = b"<html>"
    url = f"http://127.0.0.1:{numbers.server_port}"
    assert bench(url, "--backend", "openai-embeddings", "--num-prompts", "1") == 1
    assert "the answer cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--backend", "vllm-rerank"], "needs --dataset-name random-rerank"),
        (["--dataset-name", "random-rerank"], "is for `bench serve --backend vllm-rerank`"),
        (["--random-batch-size", "2"], "not for --backend openai"),
        (["--backend", "openai-embeddings-chat", "--random-batch-size", "2"], "not for --backend openai-embeddings-chat"),
        (["--backend", "openai-embeddings", "--no-reranker"], "is for --dataset-name random-rerank"),
        (["--backend", "vllm-rerank", "--dataset-name", "random-rerank", "--random-input-len", "3"], "at least 4 tokens"),
    ],
)
def test_what_does_not_go_together(numbers: Numbers, words: list[str], said: str, capsys) -> None:
    try:
        code = bench(f"http://127.0.0.1:{numbers.server_port}", *words)
    except SystemExit as end:
        code = end.code
    assert code in (1, 2) and said in capsys.readouterr().err


def test_texts_are_as_long_as_their_tokenizer_counts() -> None:
    tokenizer = byte_level()
    (request, *_) = pooling.random_pairs(4, 40, 2, True, tokenizer=tokenizer, seed=3, as_words=True)
    lengths = [len(tokenizer.encode(text, add_special_tokens=False).ids) for text in request.prompt]
    assert request.prompt_len == sum(lengths)
    assert all(abs(n - wanted) < 3 for n, wanted in zip(lengths, (19, 20, 20), strict=True))
    both = pooling.batched(random_requests(3, 8, 1, seed=1), 2)
    assert [r.prompt_len for r in both] == [16, 8] and pooling.batched([Request("x", 1, 1)], 1) == [Request("x", 1, 1)]
    with pytest.raises(DatasetError, match="the query is one of the texts"):
        pooling.random_pairs(1, 40, 2, False, seed=3)


def test_a_server_answers_all_of_them(tmp_path) -> None:
    """The bundled embedder; its scores are the similarity of vectors."""
    with Served("--runner", "pooling", *SMALL) as served:
        served.ready()
        load = ("--num-prompts", "6", "--random-input-len", "16", "--random-batch-size", "3")
        text = ("--tokenizer", str(EMBEDDER.folder))
        for words in (
            ("--backend", "openai-embeddings", *load),
            ("--backend", "openai-embeddings", *load, *text),
            ("--backend", "infinity-embeddings", *load, *text),
            ("--backend", "openai-embeddings", *load, "--extra-body", '{"encoding_format": "bytes"}'),
            ("--backend", "vllm-pooling", *load, "--extra-body", '{"task": "embed"}'),
            ("--backend", "vllm-rerank", "--dataset-name", "random-rerank", *load, *text),
            ("--backend", "vllm-rerank", "--dataset-name", "random-rerank", "--no-reranker", *load, *text),
        ):
            saved = ("--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json")
            assert bench(served.url, *words, *saved) == 0
            found = json.loads((tmp_path / "r.json").read_text())
            assert found["failed"] == 0 and found["total_input_tokens"] > 0
        assert served.end() == 0

"""`quire serve` with models of token vectors: ColBERT ranks by MaxSim, BGE-M3 makes three kinds of vectors from one pass."""

import base64
import os
import signal
from threading import Thread
from typing import Any

import numpy as np
import psutil
import pytest
from deadlines import DEADLINE_S
from encoder_cases import WORDS
from late_cases import MASK, by_formula, expected_of_m3, make_colbert, make_m3
from serving import SMALL as FLAGS
from serving import Served, command_of

QUERY_TEXT, DOCUMENTS = "w1 w2 w3", ["w1 w65 w9", "w7", "w2 w3 w4 w5"]


def ids(text: str, marker: str) -> list[int]:
    return [WORDS.index(word) for word in ("[CLS]", marker, *text.split(), "[SEP]")]


def ask(served: Served, path: str, body: Any, status: int = 200) -> Any:
    answer = served.ask("POST", path, body)
    assert answer.status == status, answer.body
    return answer.json()


def test_colbert_ranks_by_maxsim(tmp_path: Any) -> None:
    folder, theirs, weight, _ = make_colbert("pylate", tmp_path)
    query = ids(QUERY_TEXT, "w85")
    filled = query + [MASK] * (12 - len(query))
    of_query = by_formula(theirs, weight, filled, [int(i < len(query)) for i in range(12)])
    expected = []
    for document in DOCUMENTS:
        row = ids(document, "w86")
        vectors = by_formula(theirs, weight, row)[[token != WORDS.index("w65") for token in row]]
        expected.append(float((of_query @ vectors.T).max(1).sum()))
    with Served("--model", str(folder), *FLAGS) as served:
        served.ready()
        ranked = ask(served, "/v1/rerank", {"query": QUERY_TEXT, "documents": DOCUMENTS})["results"]
        longer = {"query": QUERY_TEXT, "documents": [f"{DOCUMENTS[2]} w9"], "max_tokens_per_doc": 4}
        cut = ask(served, "/rerank", longer)["results"]
        scores = ask(served, "/score", {"text_1": QUERY_TEXT, "text_2": DOCUMENTS})["data"]
        tokens = ask(served, "/pooling", {"input": QUERY_TEXT, "prompt_name": "query"})["data"][0]["data"]
        refused = ask(served, "/v1/embeddings", {"input": QUERY_TEXT}, 400)
        unknown = ask(served, "/pooling", {"input": QUERY_TEXT, "prompt_name": "question"}, 400)
        assert served.end() == 0
    assert [each["score"] for each in scores] == pytest.approx(expected, abs=1e-4)
    order = sorted(range(3), key=lambda i: -expected[i])
    assert [each["index"] for each in ranked] == order
    assert cut[0]["relevance_score"] == pytest.approx(expected[2], abs=1e-4)  # as without the last word
    np.testing.assert_allclose(tokens, of_query, atol=2e-5)
    assert "vectors of tokens" in refused["error"]["message"] and unknown["error"]["param"] == "prompt_name"


def test_scores_of_many_pairs_outlive_a_worker_that_is_killed(tmp_path: Any) -> None:
    """Queries travel with their documents, so other workers compute what was in flight: no score is lost or changed."""
    folder, *_ = make_colbert("stanford", tmp_path)
    texts = [" ".join(f"w{1 + (7 * i + j) % 80}" for j in range(1 + i % 25)) for i in range(3000)]
    body, own = {"text_1": QUERY_TEXT, "text_2": texts}, {"text_1": texts[:200], "text_2": texts[200:400]}
    with Served("--model", str(folder), *FLAGS) as served:
        served.ready()
        first, second = ask(served, "/score", body), ask(served, "/score", own)
        found: list[Any] = []
        asking = [Thread(target=lambda each=each: found.append(ask(served, "/score", each))) for each in (body, own)]
        for each in asking:
            each.start()
        workers = [p for p in psutil.Process(served.process.pid).children(recursive=True) if "quire.workers" in command_of(p)]
        os.kill(workers[0].pid, signal.SIGKILL)
        for each in asking:
            each.join(DEADLINE_S)
        assert served.end() == 0
    by_length = {len(answer["data"]): answer for answer in found}
    for before in (first, second):
        again = by_length[len(before["data"])]
        np.testing.assert_allclose([d["score"] for d in again["data"]], [d["score"] for d in before["data"]], atol=1e-5)
        assert again["usage"] == before["usage"]


def test_a_query_of_too_many_vectors_is_compared_here(tmp_path: Any, monkeypatch: Any) -> None:
    from quire import LLM

    folder, *_ = make_colbert("pylate", tmp_path)
    with LLM(str(folder), device="cpu", disable_log_stats=True) as llm:
        first = [each.outputs.score for each in llm.score([QUERY_TEXT, "w7", QUERY_TEXT], [*DOCUMENTS])]
        monkeypatch.setattr("quire.frontend.client.scoring.MAX_QUERY_BYTES", 100)
        again = [each.outputs.score for each in llm.score([QUERY_TEXT, "w7", QUERY_TEXT], [*DOCUMENTS])]
    assert first == pytest.approx(again, abs=1e-5) and len(set(first)) == 3


def test_bge_m3_makes_all_its_vectors(tmp_path: Any) -> None:
    folder, theirs = make_m3(tmp_path)
    row = [2, 6, 7, 6, 3]
    dense, sparse, tokens = expected_of_m3(folder, theirs, row, (2, 3))
    with Served("--model", str(folder), "--hf-overrides", '{"is_matryoshka": true}', *FLAGS) as served:
        served.ready()
        body = {"input": ["w1 w2 w1", "w4"], "task": ["embed", "embed_sparse", "token_embed"]}
        both = ask(served, "/pooling", body)["data"]
        packed = ask(served, "/pooling", {**body, "encoding_format": "base64"})["data"][0]["data"]
        alone = ask(served, "/embed_sparse", {"inputs": "w1 w2 w1"})
        vector = ask(served, "/v1/embeddings", {"input": "w1 w2 w1"})["data"][0]["embedding"]
        refused = ask(served, "/pooling", {**body, "task": ["embed", "classify"]}, 400)
        pair = {"query": "w1 w2 w1", "documents": ["w4", "w2 w1 w5"], "weights_for_different_modes": [0.4, 0.2, 0.4]}
        ranked = ask(served, "/rerank", pair)["results"]
        half = ask(served, "/rerank", {**pair, "dimensions": len(dense) // 2})["results"]
        given = {"use_activation": False, "normalize": False, "raw_scores": True, "instruction": "Find it.", "dimensions": 4096}
        named = [ask(served, "/rerank", {**pair, name: value}, 400)["error"]["param"] for name, value in given.items()]
        plain = ask(served, "/score", {"text_1": "w1 w2 w1", "text_2": "w2 w1 w5"})["data"][0]["score"]
        wrong = [ask(served, "/rerank", {**pair, "weights_for_different_modes": each}, 400) for each in ([1, 1], [1, -1, 1])]
        assert served.end() == 0
    found = both[0]["data"]
    other, of_other, tokens_of_other = expected_of_m3(folder, theirs, [2, 7, 6, 10, 3], (2, 3))
    shared = sum(weight * of_other.get(token, 0.0) for token, weight in sparse.items())
    for size, answer in ((len(dense), ranked), (len(dense) // 2, half)):
        a, b, c, d = (
            x[..., :size] / np.linalg.norm(x[..., :size], axis=-1, keepdims=True)
            for x in (dense, other, tokens, tokens_of_other)
        )
        combined = 0.4 * a @ b + 0.2 * shared + 0.4 * (c @ d.T).max(1).mean()
        assert {each["index"]: each["relevance_score"] for each in answer}[1] == pytest.approx(combined, abs=1e-5)
    assert named == list(given)
    assert plain == pytest.approx(dense @ other, abs=1e-5) and abs(plain - combined) > 1e-3
    assert {each["error"]["param"] for each in wrong} == {"weights_for_different_modes"}
    np.testing.assert_allclose(found["embed"], dense, atol=1e-5)
    np.testing.assert_allclose(vector, dense, atol=1e-5)
    np.testing.assert_allclose(found["token_embed"], tokens, atol=1e-5)
    assert {each["index"]: each["value"] for each in found["embed_sparse"]} == pytest.approx(sparse, abs=1e-5)
    assert alone == [found["embed_sparse"]] and len(both[1]["data"]["token_embed"]) == 2
    assert np.frombuffer(base64.b64decode(packed["embed"]), np.float32).tolist() == found["embed"]
    assert refused["error"]["param"] == "task"

"""Vectors and scores over HTTP: the `openai` package, the routes of other servers, errors, and a worker that is killed."""

import base64
import json
import os
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
from deadlines import DEADLINE_S
from serving import Served, command_of
from tiny_models import tiny_model
from tiny_pools import as_sentence_transformer, classifier, logits

openai = pytest.importorskip("openai")

TEXTS = ["A quire is a gathered set of pages.", "The binder folds the sheets once.", "x"]


def call(served: Served, path: str, body: Any = None, status: int = 200) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{served.url}{path}", data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            found, raw = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        found, raw = error.code, error.read()
    assert found == status, raw[:500]
    return json.loads(raw) if raw[:1] in b"{[" else raw


def vectors(served: Served, texts: Any = TEXTS, **more: Any) -> np.ndarray:
    return np.array([each["embedding"] for each in call(served, "/v1/embeddings", {"input": texts, **more})["data"]])


@pytest.fixture(scope="module")
def embedder() -> Iterator[Served]:
    """A model that generates, too, with prompts by name."""
    folder = as_sentence_transformer("qwen3", prompts={"query": "Find: ", "document": "Read: "})
    with Served(folder, "--runner", "generate", "--convert", "embed", "--served-model-name", "tiny") as served:
        served.ready()
        yield served
        assert served.end() == 0


def scorer_folder() -> str:
    return classifier("qwen3", "ForSequenceClassification", 1)[0]


@pytest.fixture(scope="module")
def scorer() -> Iterator[tuple[Served, Any]]:
    _, model = classifier("qwen3", "ForSequenceClassification", 1)
    with Served(scorer_folder(), "--served-model-name", "tiny") as served:
        served.ready()
        yield served, model
        assert served.end() == 0


def test_the_openai_package_gets_equal_vectors_in_every_format(embedder: Served) -> None:
    with openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="x", max_retries=0, timeout=DEADLINE_S) as client:
        coded = client.embeddings.create(model="tiny", input=TEXTS)  # base64, without being asked
        plain = client.embeddings.create(model="tiny", input=TEXTS, encoding_format="float")
        alone = client.embeddings.create(model="tiny", input=TEXTS[1])
    assert np.array_equal([d.embedding for d in coded.data], np.float32([d.embedding for d in plain.data]))
    assert [d.index for d in coded.data] == [0, 1, 2] and coded.usage.prompt_tokens == coded.usage.total_tokens > 10
    assert np.abs(np.array(alone.data[0].embedding) - coded.data[1].embedding).max() < 1e-6
    assert np.allclose(np.linalg.norm([d.embedding for d in plain.data], axis=1), 1.0, atol=1e-6)


@pytest.mark.slow
def test_other_clients_get_them_too(embedder: Served) -> None:
    wanted = vectors(embedder)
    langchain = pytest.importorskip("langchain_openai")
    options = {"base_url": f"{embedder.url}/v1", "api_key": "x", "model": "tiny", "check_embedding_ctx_length": False}
    assert np.abs(np.array(langchain.OpenAIEmbeddings(**options).embed_documents(TEXTS)) - wanted).max() < 1e-6
    litellm = pytest.importorskip("litellm")
    found = litellm.embedding("openai/tiny", TEXTS, api_base=f"{embedder.url}/v1", api_key="x", encoding_format="float")
    assert np.abs(np.array([each["embedding"] for each in found.data]) - wanted).max() < 1e-6


def test_inputs_are_texts_or_ids(embedder: Served) -> None:
    ids = [call(embedder, "/tokenize", {"prompt": text})["tokens"] for text in TEXTS]
    assert np.abs(vectors(embedder, ids) - vectors(embedder)).max() < 1e-6
    assert np.abs(vectors(embedder, ids[0])[0] - vectors(embedder)[0]).max() < 1e-6
    many = vectors(embedder, [[i % 400 + 10] for i in range(2048)])
    assert many.shape == (2048, 64) and np.abs(many[:400] - many[400:800]).max() < 1e-6
    assert np.abs(vectors(embedder, TEXTS[0], prompt_name="query") - vectors(embedder, "Find: " + TEXTS[0])).max() < 1e-6
    cut = vectors(embedder, TEXTS[0], truncate_prompt_tokens=4)
    assert np.abs(cut - vectors(embedder, ids[0][:4])).max() < 1e-6
    left = vectors(embedder, TEXTS[0], truncate_prompt_tokens=4, truncation_side="left")
    assert np.abs(left - vectors(embedder, ids[0][-4:])).max() < 1e-6


def test_bytes_and_their_dtypes(embedder: Served) -> None:
    wanted = vectors(embedder).astype(np.float32)
    for dtype, form in (("float32", "<f4"), ("float16", "<f2")):
        raw = call(
            embedder,
            "/v1/embeddings",
            {"input": TEXTS, "encoding_format": "bytes_only", "embed_dtype": dtype, "endianness": "little"},
        )
        assert np.abs(np.frombuffer(raw, form).reshape(3, -1) - wanted).max() < (1e-6 if dtype == "float32" else 1e-3)
    raw = call(
        embedder, "/v1/embeddings", {"input": TEXTS, "encoding_format": "bytes", "embed_dtype": "bfloat16", "endianness": "big"}
    )
    words = np.frombuffer(raw, ">u2").astype(np.uint32) << 16
    assert np.abs(words.view(np.float32).reshape(3, -1) - wanted).max() < 4e-3
    coded = call(embedder, "/v1/embeddings", {"input": TEXTS[0], "encoding_format": "base64", "endianness": "big"})
    assert np.abs(np.frombuffer(base64.b64decode(coded["data"][0]["embedding"]), ">f4") - wanted[0]).max() < 1e-6


def test_other_servers_routes_give_the_same_vectors(embedder: Served) -> None:
    wanted = vectors(embedder)
    assert np.abs(np.array(call(embedder, "/embed", {"inputs": TEXTS})) - wanted).max() < 1e-6
    assert np.abs(np.array(call(embedder, "/api/embed", {"input": TEXTS})["embeddings"]) - wanted).max() < 1e-6
    hub = {"inputs": TEXTS, "normalize": True, "prompt_name": None, "truncate": None, "truncation_direction": None}
    assert np.abs(np.array(call(embedder, "/", hub)) - wanted).max() < 1e-6  # as Hugging Face's InferenceClient asks
    older = np.array(call(embedder, "/api/embeddings", {"prompt": TEXTS[0]})["embedding"])
    assert np.abs(older / np.linalg.norm(older) - wanted[0]).max() < 1e-6
    of_tokens = call(embedder, "/embed_all", {"inputs": TEXTS[0]})[0]
    assert np.abs(np.array(of_tokens[-1]) - older).max() < 1e-5
    pooled = call(embedder, "/pooling", {"input": TEXTS, "task": "embed"})["data"]
    assert np.abs(np.array([each["data"] for each in pooled]) - wanted).max() < 1e-6
    cohere = call(
        embedder, "/v2/embed", {"texts": TEXTS, "input_type": "search_query", "embedding_types": ["float", "int8", "ubinary"]}
    )
    queries = vectors(embedder, TEXTS, prompt_name="query")
    assert np.abs(np.array(cohere["embeddings"]["float"]) - queries).max() < 1e-6
    assert np.array_equal(cohere["embeddings"]["ubinary"], np.packbits(queries > 0, axis=-1))
    assert np.abs(np.array(cohere["embeddings"]["int8"]) / 127.5 - queries).max() < 0.02
    similar = call(embedder, "/similarity", {"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS}})
    assert np.abs(np.array(similar) - wanted @ wanted[0]).max() < 1e-5
    scores = call(embedder, "/score", {"text_1": TEXTS[0], "text_2": TEXTS})["data"]
    assert np.abs(np.array([each["score"] for each in scores]) - similar).max() < 1e-5
    ranked = call(embedder, "/v1/rerank", {"query": TEXTS[0], "documents": TEXTS, "top_n": 2})["results"]
    assert [each["index"] for each in ranked] == np.argsort(-np.array(similar))[:2].tolist() and ranked[0]["document"][
        "text"
    ] == TEXTS[0]
    assert call(embedder, "/info")["model_type"] == {"embedding": {"pooling": "last_token"}}


@pytest.mark.parametrize(
    ("path", "body", "field", "text"),
    [
        ("/v1/embeddings", {"input": ""}, "input", "empty"),
        ("/v1/embeddings", {"input": []}, "input", "1 to 2048"),
        ("/v1/embeddings", {"input": ["x"] * 2049}, "input", "1 to 2048"),
        ("/v1/embeddings", {"input": [["x"], "x"]}, "input[0][0]", "expected"),
        ("/v1/embeddings", {"input": [[1], "x"]}, "input", "a list of token ids"),
        ("/v1/embeddings", {"input": [512]}, "input", "outside the vocabulary"),
        ("/v1/embeddings", {"input": "word " * 2000}, "input", "512 tokens"),
        ("/v1/embeddings", {"input": "x", "dimensions": 0}, "dimensions", "between 1"),
        ("/v1/embeddings", {"input": "x", "dimensions": 32}, "dimensions", "not trained to be cut"),
        ("/v1/embeddings", {"input": "x", "encoding_format": "hex"}, "encoding_format", "base64"),
        ("/v1/embeddings", {"input": "x", "prompt_name": "none"}, "prompt_name", "query, document"),
        ("/v1/embeddings", {"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
        ("/v1/embeddings", {"input": "x", "messages": [{"role": "user"}]}, "input", "exclude each other"),
        ("/pooling", {"input": "x", "task": "classify"}, "task", "embed, token_embed"),
        ("/v2/embed", {"texts": ["x"], "embedding_types": ["int4"]}, "embedding_types", "ubinary"),
        ("/v2/embed", {"texts": ["x"], "input_type": "poem"}, "input_type", "search_query"),
        ("/v2/embed", {"texts": ["x"], "output_dimension": 0}, "output_dimension", "between 1"),
        ("/v2/embed", {"texts": ["x"], "output_dimension": 7}, "output_dimension", "output_dimension"),
        ("/v2/embed", {"texts": ["x", ""]}, "texts", "empty"),
        ("/pooling", {"input": "x", "task": ["embed", "embed"]}, "task", "different tasks"),
        ("/rerank", {"query": "x", "documents": ["y"], "instruction": "Judge."}, "instruction", "without a template"),
        ("/", {"inputs": ["x"] * 2049}, "inputs", "1 to 2048"),
        ("/classify", {"input": "x"}, "model", "it can generate text (/v1/chat/completions) and make vectors"),
        ("/predict", {"inputs": "x"}, "model", "cannot classify"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1", "2 and 3"),
        ("/rerank", {"query": "x"}, "documents", "required"),
        ("/rerank", {"query": "x", "documents": ["y"] * 100_000}, "documents", "got 100000"),
        ("/rerank", {"query": "x", "documents": ["y"], "top_n": -1}, "top_n", "at least 0"),
    ],
)  # fmt: skip
def test_errors_name_the_field(embedder: Served, path: str, body: Any, field: str, text: str) -> None:
    error = call(embedder, path, body, 400)["error"]
    assert error["param"] == field and text in error["message"], error


def test_a_model_that_only_generates_says_so_and_one_that_does_not_too(scorer: tuple[Served, Any]) -> None:
    served, _ = scorer
    error = call(served, "/v1/embeddings", {"input": "x"}, 400)["error"]
    assert error["code"] == "unsupported_task" and "it can classify and classify tokens" in error["message"]
    error = call(served, "/v1/completions", {"prompt": "x"}, 400)["error"]
    assert "cannot generate text" in error["message"]


def test_scores_are_the_classifiers_of_pairs(scorer: tuple[Served, Any]) -> None:
    served, model = scorer
    query, documents = "a page", ["a set of pages", "the thread", "a page"]

    def wanted(document: str) -> float:
        ids = [call(served, "/tokenize", {"prompt": text})["tokens"] for text in (query, document)]
        return float(1 / (1 + np.exp(-logits(model, ids[0] + ids[1])[0])))

    expected = [wanted(document) for document in documents]
    scores = [d["score"] for d in call(served, "/v1/score", {"queries": query, "documents": documents})["data"]]
    assert np.abs(np.array(scores) - expected).max() < 1e-5
    ranked = call(served, "/v2/rerank", {"query": query, "documents": documents, "return_documents": False})["results"]
    assert [r["index"] for r in ranked] == np.argsort(-np.array(expected)).tolist() and "document" not in ranked[0]
    of_tei = call(served, "/rerank", {"query": query, "texts": documents, "raw_scores": True, "return_text": True})
    assert of_tei[0]["text"] == documents[ranked[0]["index"]]
    assert abs(of_tei[0]["score"] - np.log(max(expected) / (1 - max(expected)))) < 1e-3
    one = call(served, "/classify", {"input": documents})["data"]
    assert [each["label"] for each in one] == ["kind 0"] * 3 and one[0]["num_classes"] == 1
    predicted = call(served, "/predict", {"inputs": [["a page", "the thread"], ["alone"]]})
    assert abs(predicted[0][0]["score"] - expected[1]) < 1e-5 and predicted[1][0]["label"] == "kind 0"
    assert call(served, "/", {"inputs": [["a page", "the thread"], ["alone"]]}) == predicted
    far = call(served, "/predict", {"inputs": [[query, "word " * 1000], ["word " * 1000]], "truncate": True})
    assert all(0 < each[0]["score"] < 1 for each in far)
    error = call(served, "/predict", {"inputs": [[query, "word " * 300]]}, 400)["error"]
    assert error["param"] == "inputs" and "tokens" in error["message"]
    long = call(served, "/score", {"text_1": query, "text_2": ["word " * 1000], "truncate_prompt_tokens": -1})
    assert 0 < long["data"][0]["score"] < 1
    assert "tokens" in call(served, "/score", {"text_1": query, "text_2": ["word " * 300]}, 400)["error"]["message"]
    huge = {"text_1": query, "text_2": ["word " * 1_000_000]}  # cut before it is tokenized
    assert call(served, "/score", {**huge, "truncate_prompt_tokens": -1})["data"] == long["data"]
    assert "characters" in call(served, "/score", huge, 400)["error"]["message"]


def test_a_chat_template_of_pairs_makes_their_prompts(scorer: tuple[Served, Any], tmp_path: Any) -> None:
    served, model = scorer
    template = tmp_path / "pairs.jinja"
    template.write_text(
        '{{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }} for '
        '{{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}'
    )
    ids = call(served, "/tokenize", {"prompt": "the thread for a page", "add_special_tokens": False})["tokens"]
    with Served(scorer_folder(), "--chat-template", str(template), "--served-model-name", "tiny") as other:
        other.ready()
        (score,) = call(other, "/score", {"text_1": "a page", "text_2": "the thread"})["data"]
        assert abs(score["score"] - 1 / (1 + np.exp(-float(logits(model, ids)[0])))) < 1e-5
        assert other.end() == 0


@pytest.mark.slow
def test_requests_outlive_a_worker_that_is_killed(embedder: Served) -> None:
    texts = [f"{i} " + "page after page " * 30 for i in range(300)]
    wanted, found = vectors(embedder, texts[:20]), []
    tokens = {"prompt": "Once", "max_tokens": 64, "temperature": 0, "ignore_eos": True}
    text = call(embedder, "/v1/completions", tokens)["choices"][0]["text"]
    both = [
        threading.Thread(target=lambda: found.append(vectors(embedder, texts))),
        threading.Thread(target=lambda: found.append(call(embedder, "/v1/completions", tokens)["choices"][0]["text"])),
    ]
    for each in both:
        each.start()
    workers = [p for p in psutil.Process(embedder.process.pid).children(recursive=True) if "quire.workers" in command_of(p)]
    os.kill(workers[0].pid, signal.SIGKILL)
    for each in both:
        each.join(DEADLINE_S)
    (made,) = (each for each in found if not isinstance(each, str))
    assert made.shape == (300, 64) and np.abs(made[:20] - wanted).max() < 1e-6
    assert [each for each in found if isinstance(each, str)] == [text]


def test_a_deadline_ends_a_request(embedder: Served) -> None:
    error = call(embedder, "/v1/embeddings", {"input": ["word " * 100] * 1500, "timeout": 0.05}, 504)["error"]
    assert error["code"] == "deadline_exceeded"
    assert vectors(embedder, TEXTS[0]).shape == (1, 64)


def test_python_has_the_same_calls() -> None:
    from quire import LLM, PoolingParams
    from quire.outputs import EmbeddingRequestOutput, ScoringRequestOutput

    with LLM(tiny_model("qwen3"), runner="pooling", disable_log_stats=True) as llm:
        assert llm.supported_tasks == ("embed", "token_embed")
        first, second = llm.embed(TEXTS[:2])
        assert isinstance(first, EmbeddingRequestOutput) and first.outputs.hidden_size == 64 and first.finished
        (alone,) = llm.encode(TEXTS[1], PoolingParams(task="embed"))
        assert np.abs(alone.outputs.data - np.float32(second.outputs.embedding)).max() < 1e-6
        (score,) = llm.score(TEXTS[0], TEXTS[1])
        assert isinstance(score, ScoringRequestOutput)
        assert abs(score.outputs.score - np.dot(first.outputs.embedding, second.outputs.embedding)) < 1e-5
        ranked = llm.rerank(TEXTS[0], TEXTS, top_n=1)
        assert [each.index for each in ranked] == [0]
        with pytest.raises(ValueError, match="cannot classify; it can embed, token_embed"):
            llm.classify(TEXTS)
        with pytest.raises(ValueError, match="does not generate"):
            llm.generate(TEXTS[0])

"""`quire serve` with encoders: vectors of a BERT as sentence-transformers makes them, scores of pairs by a cross-encoder."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from encoder_cases import HIDDEN, SMALL, add_tokenizer, pair, their_hidden
from serving import SMALL as FLAGS
from serving import Served

openai = pytest.importorskip("openai")

ST = "sentence_transformers.models."
TEXTS = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9 w10 w11 w12"]
LONGEST = 32


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Any, Any]]:
    folder = tmp_path_factory.mktemp("embedder")
    theirs = pair(transformers.BertModel, transformers.BertConfig(**SMALL), folder).theirs
    tokenizer = add_tokenizer(folder)
    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    listed = [{"idx": i, "name": str(i), "path": path, "type": f"{ST}{kind}"} for i, (kind, path) in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    fields = {"word_embedding_dimension": HIDDEN, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(fields))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": LONGEST}))
    with Served("--model", str(folder), *FLAGS) as served:
        served.ready()
        yield served, theirs, tokenizer
        assert served.end() == 0


def expected(theirs: Any, tokenizer: Any, text: str) -> np.ndarray:
    mean = their_hidden(theirs, tokenizer.encode(text).ids).mean(0)
    return (mean / mean.norm()).numpy()


def test_vectors_equal_transformers_in_floats_and_base64(embedder: tuple[Served, Any, Any]) -> None:
    served, theirs, tokenizer = embedder
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        model = client.models.list().data[0].id
        answer = client.embeddings.create(model=model, input=TEXTS, encoding_format="float")
        encoded = client.embeddings.with_raw_response.create(model=model, input=TEXTS, encoding_format="base64")
    assert answer.usage.prompt_tokens == sum(len(tokenizer.encode(text).ids) for text in TEXTS)
    rows = json.loads(encoded.text)["data"] if isinstance(encoded.text, str) else encoded.http_response.json()["data"]
    for text, found, other in zip(TEXTS, answer.data, rows, strict=True):
        vector = np.array(found.embedding, np.float32)
        assert np.abs(vector - expected(theirs, tokenizer, text)).max() < 1e-5
        assert np.array_equal(np.frombuffer(base64.b64decode(other["embedding"]), np.float32), vector)


def test_what_an_encoder_cannot_do_is_a_400(embedder: tuple[Served, Any, Any]) -> None:
    served, _, _ = embedder
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        model = client.models.list().data[0].id
        with pytest.raises(openai.BadRequestError, match="embed"):
            client.completions.create(model=model, prompt="w1", max_tokens=3)
        with pytest.raises(openai.BadRequestError, match=str(LONGEST)):
            client.embeddings.create(model=model, input="w1 " * 100)


def test_pairs_are_scored_with_their_types(tmp_path: Any) -> None:
    config = transformers.BertConfig(**SMALL, num_labels=1)
    theirs, tokenizer = pair(transformers.BertForSequenceClassification, config, tmp_path).theirs, add_tokenizer(tmp_path)
    with Served("--model", str(tmp_path), *FLAGS) as served:
        served.ready()
        answer = served.ask("POST", "/v1/rerank", {"query": TEXTS[0], "documents": TEXTS[1:]}).json()
        assert served.end() == 0
    scores = {result["index"]: result["relevance_score"] for result in answer["results"]}
    for i, document in enumerate(TEXTS[1:]):
        encoded = tokenizer.encode(TEXTS[0], document)
        with torch.no_grad():
            ids, types = torch.tensor([encoded.ids]), torch.tensor([encoded.type_ids])
            score = theirs(input_ids=ids, token_type_ids=types).logits.sigmoid().item()
        assert scores[i] == pytest.approx(score, abs=1e-5)


def test_a_text_longer_than_a_step_is_refused_with_the_flag() -> None:
    with Served("--runner", "pooling", "--max-num-batched-tokens", "64", *FLAGS) as served:
        served.ready()
        answer = served.ask("POST", "/v1/embeddings", {"input": "again " * 80})
        assert served.end() == 0
    assert answer.status == 400 and "--max-num-batched-tokens" in answer.json()["error"]["message"]

"""Inputs: conversations, prompts that do not count, lower case, and texts longer than the context."""

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

F = torch.nn.functional
ST, LONGEST = "sentence_transformers.models.", 16
TEMPLATE = "{% for m in messages %}{{ m.content }} w9 {% endfor %}{% if add_generation_prompt %}w8{% endif %}"
LONG = {"enable_chunked_processing": True, "max_embed_len": 40}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Any, Any]]:
    folder = tmp_path_factory.mktemp("inputs")
    theirs = pair(transformers.BertModel, transformers.BertConfig(**SMALL), folder).theirs
    tokenizer = add_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    listed = [{"idx": i, "name": str(i), "path": path, "type": f"{ST}{kind}"} for i, (kind, path) in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    fields = {"word_embedding_dimension": HIDDEN, "pooling_mode_mean_tokens": True, "include_prompt": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(fields))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": LONGEST, "do_lower_case": True}))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "w1 w2 "}}))
    with Served("--model", str(folder), "--pooler-config", json.dumps(LONG), *FLAGS) as server:
        server.ready()
        yield server, theirs, tokenizer
        assert server.end() == 0


def vector(server: Served, status: int = 200, **body: Any) -> Any:
    answer = server.ask("POST", "/v1/embeddings", body)
    assert answer.status == status, answer.body
    return np.array(answer.json()["data"][0]["embedding"]) if status == 200 else answer.json()["error"]


def mean(theirs: Any, ids: list[int], skipped: int = 0) -> torch.Tensor:
    return F.normalize(their_hidden(theirs, ids)[skipped:].mean(0), dim=-1)


def test_conversations_go_through_the_chat_template(served: tuple[Served, Any, Any]) -> None:
    server, theirs, tokenizer = served
    messages = [{"role": "user", "content": "w3"}, {"role": "assistant", "content": "w4 w5"}]
    ids = tokenizer.encode("w3 w9 w4 w5 w9", add_special_tokens=False).ids
    np.testing.assert_allclose(vector(server, messages=messages), mean(theirs, ids), atol=1e-5)
    opened = vector(server, messages=messages, add_generation_prompt=True)
    np.testing.assert_allclose(opened, mean(theirs, [*ids, *tokenizer.encode("w8", add_special_tokens=False).ids]), atol=1e-5)
    assert vector(server, 400, input="w1", messages=messages)["param"] == "input"
    assert vector(server, 400)["param"] == "input" and vector(server, 400, messages=[])["param"] == "messages"


def test_prompts_do_not_count_and_texts_are_written_small(served: tuple[Served, Any, Any]) -> None:
    server, theirs, tokenizer = served
    ids = tokenizer.encode("w1 w2 w7 w8").ids
    np.testing.assert_allclose(vector(server, input="W7 w8", prompt_name="query"), mean(theirs, ids, 3), atol=1e-5)
    for keep, text, skipped in ((5, "W7 w8", 2), (9, "w7 w8", 3), (4, "w7 w8", 1), (4, "w5 w6 w7 w8 " * 99, 0)):
        cut = vector(server, input=text, prompt_name="query", truncate_prompt_tokens=keep, truncation_side="left")
        expected = mean(theirs, [ids[0], *ids[max(len(ids) + 1 - keep, 1) :]], skipped)
        np.testing.assert_allclose(cut, expected, atol=1e-5)


def test_long_texts_are_means_of_their_parts(served: tuple[Served, Any, Any]) -> None:
    server, theirs, tokenizer = served
    ids = tokenizer.encode(" ".join(f"w{i}" for i in range(1, 36))).ids
    parts = [ids[:LONGEST], ids[LONGEST : 2 * LONGEST], ids[2 * LONGEST :]]
    expected = sum(len(part) * mean(theirs, part) for part in parts)
    np.testing.assert_allclose(vector(server, input=ids), F.normalize(expected, dim=-1), atol=1e-5)
    assert "40" in vector(server, 400, input="w1 " * 50)["message"]
    cut = vector(server, input=" ".join(f"w{i}" for i in range(1, 36)), truncate_prompt_tokens=-1)
    np.testing.assert_allclose(cut, mean(theirs, [*ids[: LONGEST - 1], ids[-1]]), atol=1e-5)


def test_two_kinds_of_vectors_come_from_one_pass(served: tuple[Served, Any, Any]) -> None:
    server, theirs, tokenizer = served
    body = {"input": "w7 w8", "task": ["token_embed", "embed"]}
    (found,) = server.ask("POST", "/pooling", body).json()["data"]
    states = their_hidden(theirs, tokenizer.encode("w7 w8").ids)
    np.testing.assert_allclose(found["data"]["token_embed"], F.normalize(states, dim=-1), atol=1e-5)
    np.testing.assert_allclose(found["data"]["embed"], F.normalize(states.mean(0), dim=-1), atol=1e-5)


@pytest.mark.parametrize("field", ["task", "late_chunking"])
def test_what_is_not_served_is_named(served: tuple[Served, Any, Any], field: str) -> None:
    assert vector(served[0], 400, input="w1", **{field: True})["param"] == field

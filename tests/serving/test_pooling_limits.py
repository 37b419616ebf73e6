"""Vectors where something is short or wrong: a full queue, more documents than it holds, and a result that is no number."""

import shutil
import time
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
from deadlines import DEADLINE_S
from safetensors.torch import load_file, save_file
from serving import SMALL as FLAGS
from serving import Served

from quire.ipc.bundled import EMBEDDER

SHORT_QUEUE = ("--runner", "pooling", "--max-num-waiting", "256", *FLAGS)


def ask(served: Served, path: str, body: Any) -> Any:
    return served.ask("POST", path, body)


def test_a_full_queue_refuses_a_body_as_a_whole_and_at_once() -> None:
    with Served(*SHORT_QUEUE) as served:
        served.ready()
        answer = ask(served, "/v1/embeddings", {"input": ["a text of some words"] * 2048})
        assert answer.status == 503 and answer.json()["error"]["code"] == "overloaded" and "retry-after" in answer.headers
        deadline = time.monotonic() + DEADLINE_S
        while (fits := ask(served, "/v1/embeddings", {"input": ["a text of some words"] * 100})).status == 503:
            assert time.monotonic() < deadline  # until the rest of the refused one is out of the queue
        assert fits.status == 200 and len(fits.json()["data"]) == 100
        assert served.end() == 0


def test_more_documents_than_the_queue_holds_are_ranked_in_turns() -> None:
    documents = [f"{i} pages of a quire" for i in range(5000)]
    with Served("--runner", "pooling", "--max-num-waiting", "4200", *FLAGS) as served:
        served.ready()
        answer = ask(served, "/score", {"text_1": documents[4321], "text_2": documents})
        assert answer.status == 200
        scores = [each["score"] for each in answer.json()["data"]]
        assert len(scores) == 5000 and int(np.argmax(scores)) == 4321
        assert served.end() == 0


def test_a_result_that_is_no_number_fails_its_request_alone(tmp_path: Path) -> None:
    shutil.copytree(EMBEDDER.folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    (name,) = [name for name in tensors if name.endswith("word_embeddings.weight")]
    tensors[name][77] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    with Served("--model", str(tmp_path), *FLAGS) as served:
        served.ready()
        wanted = ask(served, "/v1/embeddings", {"input": [[20, 30, 40]]}).json()["data"][0]["embedding"]
        found: list[tuple[bool, Any]] = []

        def one(is_bad: bool) -> None:
            found.append((is_bad, ask(served, "/v1/embeddings", {"input": [[20, 30, 77 if is_bad else 40]]})))

        threads = [Thread(target=one, args=(i % 3 == 0,)) for i in range(12)]  # they share steps
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert served.end() == 0
    assert len(found) == 12
    for is_bad, answer in found:
        assert answer.status == (500 if is_bad else 200), answer
        if is_bad:
            assert answer.json()["error"]["code"] == "engine_error"
        else:
            np.testing.assert_allclose(answer.json()["data"][0]["embedding"], wanted, atol=1e-6)

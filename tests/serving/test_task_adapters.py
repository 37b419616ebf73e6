"""jina-embeddings-v5 with adapters for its tasks: each request chooses one, as if that task were merged into the weights."""

import numpy as np
import pytest
import toy_tokenizers
from jina_checkpoints import write_jina_v5
from serving import Served

FLAGS = ("--device", "cpu", "--max-num-seqs", "8", "--runner", "pooling")
INPUT = [[5, 6, 7, 8, 9], [10, 11]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("jina")
    write_jina_v5(made, "small")
    for name, data in toy_tokenizers.files().items():
        if not (made / name).exists():
            (made / name).write_bytes(data)
    return made


def vectors(served, **more):
    """[texts, H], or (status, body) of an error."""
    answer = served.ask("POST", "/v1/embeddings", {"input": INPUT, **more})
    found = answer.json()
    return np.array([each["embedding"] for each in found["data"]]) if answer.status == 200 else (answer.status, str(found))


@pytest.mark.slow
def test_each_request_chooses_its_task(folder):
    with Served(str(folder), *FLAGS) as served:
        retrieval, said = vectors(served), vectors(served, task="other")
        assert said[0] == 400 and "--enable-lora" in said[1]
    with Served(str(folder), *FLAGS, "--hf-overrides", '{"jina_task": "other"}') as served:
        other = vectors(served)
    with Served(str(folder), *FLAGS, "--enable-lora", "--max-loras", "2") as served:
        found = {task: vectors(served, task=task) for task in ("retrieval", "other", None)}
        for task, want in (("retrieval", retrieval), ("other", other), (None, retrieval)):
            assert np.abs(found[task] - want).max() < 1e-4, task
        assert np.abs(retrieval - other).max() > 1e-2
        for wrong in ("third", 3, ["other"]):
            status, said = vectors(served, task=wrong)
            assert status == 400 and "task must be one of retrieval, other" in said
        assert np.abs(vectors(served, model="other") - other).max() < 1e-4
        status, said = vectors(served, model="other", task="retrieval")
        assert status == 400 and "is for one task" in said

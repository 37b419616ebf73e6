"""`quire serve --runner pooling` without a model: the bundled embedder finds paraphrases, batched and alone, in any dtype."""

import random
import sys
from pathlib import Path

import numpy as np
import pytest
from serving import SMALL as FLAGS
from serving import Served

from quire.ipc.bundled import EMBEDDER

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import embed_data

openai = pytest.importorskip("openai")
PAIRS = embed_data.scored_pairs(random.Random("served"), 100)


def vectors(served: Served, texts: list[str]) -> np.ndarray:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        data = client.embeddings.create(model=EMBEDDER.name, input=texts).data
    return np.array([each.embedding for each in data], np.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_paraphrases_in_unseen_words_are_found(dtype: str) -> None:
    with Served("--runner", "pooling", "--dtype", dtype, *FLAGS) as served:
        served.ready()
        first, second = (vectors(served, list(side)) for side in zip(*PAIRS, strict=True))
        alone = vectors(served, [PAIRS[7][1]])[0]
        assert served.end() == 0
    found = (second @ first.T).argmax(1)
    assert (found == np.arange(100)).mean() >= 0.9 > embed_data.bag_of_words_score(PAIRS) + 0.4
    assert alone @ second[7] > 0.9999 and (alone @ first.T).argmax() == found[7]
    np.testing.assert_allclose(np.linalg.norm(first, axis=1), 1.0, rtol=1e-5)


def test_the_folder_is_small() -> None:
    assert sum(path.stat().st_size for path in EMBEDDER.folder.rglob("*") if path.is_file()) <= 4_000_000

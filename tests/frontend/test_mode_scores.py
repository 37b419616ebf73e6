"""`mode_scores`: pairs by three kinds of vectors, with a bounded number of tokens in memory and of products at a time."""

import asyncio
import tracemalloc
import weakref

import msgspec
import numpy as np
import pytest
from fake_client import FakeClient

from quire.frontend.client.late import ELEMENTS_AT_ONCE
from quire.frontend.client.mode_scores import PAIRS_AT_ONCE, TOKENS_AT_ONCE
from quire.frontend.client.pooling import PooledState
from quire.frontend.client.scoring import score_pairs
from quire.frontend.client.stream import InvalidRequest
from quire.ipc.messages.frontend import EngineLimits
from quire.ipc.pooling import PoolingInfo, PoolingParams

WEIGHTS, SIZE = [0.5, 0.2, 0.3], 2


def parts(ids):
    """Dense, sparse and token vectors, made of a text's ids."""
    row = np.asarray(ids, np.float32)
    kinds = np.unique(row)
    tokens = np.stack([np.sin(row), np.cos(row)], 1)[1:]
    return np.array([len(row) % 7, row[0]], np.float32) / 100, tokens, np.stack([kinds, kinds / 100], 1)


def expected(query, document):
    (dense, tokens, sparse), (of_dense, of_tokens, of_sparse) = parts(query), parts(document)
    weights = dict(of_sparse.tolist())
    shared = sum(weight * weights.get(token, 0.0) for token, weight in sparse.tolist())
    blocks = np.array_split(tokens, max(len(tokens) * len(of_tokens) // 1_000_000, 1))
    greatest = [(block @ of_tokens.T).max(1) for block in blocks] if of_tokens.size else [np.zeros(1)]
    return 0.5 * dense @ of_dense + 0.2 * shared + 0.3 * np.concatenate(greatest).mean()


class M3(FakeClient):
    """An engine that answers at once; it notes the tokens of each request, and those of results that are still held."""

    def __init__(self, **info) -> None:
        super().__init__()
        own = PoolingInfo(["embed", "token_embed", "embed_sparse"], "CLS", embedding_size=SIZE, is_whole=True, **info)
        self.welcome = msgspec.structs.replace(self.welcome, limits=EngineLimits(40_000, 300, 8, 20, pooling=own))
        self.sent, self.held, self.kept = [], [], []

    def hold(self) -> None:
        pass

    def submit_pool(self, prompts, params, **more) -> PooledState:
        assert params.use_activation
        self.held.append(sum(ref() is not None for ref in self.kept))
        state = PooledState(1, "", [len(prompt) for prompt in prompts], 0.0)
        for child, prompt in enumerate(prompts):
            result = np.concatenate([part.reshape(-1) for part in parts(prompt)])
            self.kept.append(weakref.ref(result))
            state.take(child, result, 0, True, 0)
        self.sent.append([len(prompt) for prompt in prompts])
        return state


def test_long_texts_are_compared_in_parts_and_blocks():
    """30,000 tokens with 2,000: the products as one array would take 240 MB; the first token of a text has no vector."""
    client, query = M3(), "ab" * 1000
    documents = ["bc" * 15_000, "ad" * 14_000, "xy" * 13_000, "ba" * 9000, "q"]
    tracemalloc.start()
    found = asyncio.run(score_pairs(client, [(query, each) for each in documents], weights=WEIGHTS))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * ELEMENTS_AT_ONCE * 4
    assert client.sent == [[2000, 30_000, 28_000], [26_000, 18_000, 1]] and 60_000 <= TOKENS_AT_ONCE < 86_000
    assert client.held[1] <= 2  # the query's, and those that a thread has just used
    encode = client.tokenizer.encode
    assert found.scores == pytest.approx([expected(encode(query), encode(each)) for each in documents], abs=1e-4)
    assert found.results.num_prompt_tokens == sum(map(sum, client.sent))


def test_many_short_pairs_go_some_at_a_time():
    client, encode = M3(), M3().tokenizer.encode
    pairs = [(chr(97 + i % 3) * 2, chr(97 + i % 26) * (1 + i % 50)) for i in range(2 * PAIRS_AT_ONCE + 1)]
    found = asyncio.run(score_pairs(client, pairs, weights=WEIGHTS))
    assert found.scores == pytest.approx([expected(encode(a), encode(b)) for a, b in pairs], abs=1e-5)
    assert len(client.sent) == 4 and client.held[2] <= 4  # two requests of the first part, two of the others


def test_fields_are_honored_or_refused_by_name():
    pairs = [("ab", "bc")]
    for options, field in (
        ({"params": PoolingParams(dimensions=1)}, "dimensions"),
        ({"instruction": "Find it."}, "instruction"),
        ({"weights": [1.0]}, "weights_for_different_modes"),
    ):
        with pytest.raises(InvalidRequest, match=f"^{field}: "):
            asyncio.run(score_pairs(M3(), pairs, **{"weights": WEIGHTS, **options}))

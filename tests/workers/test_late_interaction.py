"""ColBERT and BGE-M3 behind the engine's scheduler, against the formulas of their own code (late_cases.py)."""

import json

import numpy as np
import pytest
import torch
from encoder_cases import HIDDEN, POSITIONS, texts
from inline_engine import InlineEngine
from late_cases import DOCUMENT, MASK, QUERY, QUERY_LENGTH, SIZE, by_formula, expected_of_m3, make_colbert, make_m3

from quire.frontend.client.late import late_rows, maxsim, used_rows
from quire.frontend.client.pooling_parts import split_tasks
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.pooling import PoolingParams, check_pooling
from quire.workers.loading.weight_loader import WeightsError
from quire.workers.models.config import ModelConfigError
from quire.workers.pooling.late_interaction import M3Heads, greatest_weights
from quire.workers.pooling.maxsim import maxsim as on_device


def engine_of(folder, **more):
    return InlineEngine(folder, pooling={}, budget=POSITIONS, max_model_len=POSITIONS, **more)


def tokenizer_of(folder):
    names = ("tokenizer.json", "tokenizer_config.json")
    return Tokenizer.from_files({name: (folder / name).read_bytes() for name in names})


@pytest.fixture(scope="module", params=["stanford", "pylate", "modernbert"])
def colbert(request, tmp_path_factory):
    return make_colbert(request.param, tmp_path_factory.mktemp(request.param))


def test_queries_and_documents_of_colbert(colbert):
    folder, theirs, weight, attends = colbert
    engine, tokenizer = engine_of(folder), tokenizer_of(folder)
    info = engine.choice.info
    assert (info.tasks, info.token_size) == (["token_embed"], SIZE) and info.late is not None
    queries = late_rows(tokenizer, ["w1 w2 w3", "w5 " * 40], info.late, True, POSITIONS)
    documents = late_rows(tokenizer, ["w1 w65 w9", "w7", "w2 " * 60], info.late, False, POSITIONS)
    assert list(queries[0]) == [2, QUERY, 6, 7, 8, 3] + [MASK] * 6 and len(queries[1]) == QUERY_LENGTH and queries[1][-1] == 3
    assert list(documents[0]) == [2, DOCUMENT, 6, 70, 14, 3] and len(documents[2]) == 30
    rows = [*queries, *documents]
    found = engine.pool(rows, seconds=[row.second for row in rows])
    for row, got in zip(rows, found, strict=True):
        mask = [int(attends or not row.second or i < row.second) for i in range(len(row))]
        assert np.abs(got - by_formula(theirs, weight, row, mask)).max() < 2e-5
        alone = engine.pool([row], seconds=[row.second])[0]
        assert np.abs(got - alone).max() < 1e-6
    assert len(used_rows(documents[0], found[2], info)) == (6 if folder.name.startswith("stanford") else 5)
    unseen = by_formula(theirs, weight, queries[0])
    assert attends or np.abs(found[0] - unseen).max() > 1e-3  # the mask is felt


def test_a_marker_must_be_a_token(colbert, tmp_path):
    folder = colbert[0]
    for path in folder.rglob("*.json"):
        (tmp_path / path.relative_to(folder)).parent.mkdir(exist_ok=True)
        (tmp_path / path.relative_to(folder)).write_bytes(path.read_bytes())
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (tmp_path / "artifact.metadata").write_text("{}")
    settings = tmp_path / "config_sentence_transformers.json"
    settings.write_text(json.dumps({"query_prefix": "[Query]"}))
    with pytest.raises(ModelConfigError, match=r"is no token of the tokenizer"):
        engine_of(tmp_path)


def test_maxsim_equals_its_formula():
    generator = np.random.default_rng(1)
    query, *documents = (generator.normal(size=(n, 5)).astype(np.float32) for n in (4, 9, 0, 30, 1))
    expected = [sum(max((q @ d for d in document), default=0.0) for q in query) for document in documents]
    for at_once in (1 << 22, 40, 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("quire.frontend.client.late.ELEMENTS_AT_ONCE", at_once)
            np.testing.assert_allclose(maxsim(query, documents), expected, rtol=1e-5)


def test_maxsim_on_the_device_equals_that_of_the_frontend():
    generator = np.random.default_rng(2)
    query, *documents = (generator.normal(size=(n, 5)).astype(np.float32) for n in (4, 9, 0, 30, 1, 6))
    kept = [np.arange(len(document)) % 3 > 0 for document in documents]  # none of the one with a single token
    lengths, rows = np.array([len(document) for document in documents]), torch.from_numpy(np.concatenate(documents))
    of_query = torch.from_numpy(query)
    found = on_device(rows, lengths, torch.from_numpy(np.concatenate(kept)), of_query)
    expected = maxsim(query, [document[own] for document, own in zip(documents, kept, strict=True)])
    np.testing.assert_allclose(found[:, 0], expected, rtol=1e-5)
    np.testing.assert_allclose(on_device(rows, lengths, None, of_query)[:, 0], maxsim(query, documents), rtol=1e-5)
    rows[3, 1] = torch.nan  # a token of the first document: its score alone is no number
    assert torch.isnan(on_device(rows, lengths, None, of_query)[:, 0]).tolist() == [True, False, False, False, False]


def test_documents_are_compared_with_queries_of_their_step(colbert):
    """Documents of several queries share steps, beside requests for vectors; each score equals that of all vectors."""
    folder, *_ = colbert
    engine, tokenizer, generator = engine_of(folder), tokenizer_of(folder), np.random.default_rng(4)
    info = engine.choice.info
    texts = [" ".join(f"w{n}" for n in generator.integers(1, 80, length)) for length in (3, 9, 1, 25, 28, 6, 65)]
    documents = late_rows(tokenizer, [*texts, "w65"], info.late, False, POSITIONS)
    queries = late_rows(tokenizer, ["w1 w2 w3", "w5 w9"], info.late, True, POSITIONS)
    of_queries = engine.pool(queries, seconds=[row.second for row in queries])
    whole = [used_rows(row, vectors, info) for row, vectors in zip(documents, engine.pool(documents), strict=True)]
    expected = np.stack([maxsim(query, whole) for query in of_queries], 1).ravel()
    compared = [document.compared_with(query.tobytes()) for document in documents for query in of_queries]
    other = engine.add_pool(documents[:3])  # they wait in the same queue
    found = engine.pool(compared)
    assert all(score.shape == (1,) for score in found)
    np.testing.assert_allclose(np.concatenate(found), expected, rtol=1e-5, atol=1e-5)
    assert len(engine.pooled[other << 8][0]) == len(documents[0])
    alone = [engine.pool([row])[0] for row in compared[:4]]
    assert np.abs(np.concatenate(alone) - np.concatenate(found[:4])).max() < 1e-6


# -------------------------------------------------------------------------------------------------------------- BGE-M3
@pytest.fixture(scope="module")
def m3(tmp_path_factory):
    return make_m3(tmp_path_factory.mktemp("m3"))


def test_all_three_kinds_of_bge_m3(m3):
    folder, theirs = m3
    engine = engine_of(folder)
    assert engine.choice.info.tasks == ["embed", "embed_sparse", "token_embed"] and engine.choice.encoder.special_ids == (2, 3)
    rows = texts([1, 6, 30])
    rows[1][2] = rows[1][4] = rows[1][1]  # a token three times
    rows[2][0] = 2
    params = PoolingParams(tasks=["embed_sparse", "token_embed", "embed"])
    kind = check_pooling(params, engine.choice.info, engine.choice.info.tasks)
    together = engine.pool(rows, params)
    alone = [engine.pool(rows, PoolingParams(task=task)) for task in ("embed", "embed_sparse", "token_embed")]
    for i, row in enumerate(rows):
        dense, sparse, tokens = expected_of_m3(folder, theirs, row, (2, 3))
        parts = split_tasks(together[i], kind, engine.choice.info, len(row))
        for found in (parts["embed"], alone[0][i]):
            assert np.abs(found - dense).max() < 1e-5
        for found in (parts["token_embed"], alone[2][i]):
            assert found.shape == tokens.shape and np.abs(found - tokens).max(initial=0) < 1e-5
        for found in (parts["embed_sparse"], alone[1][i]):
            assert found[:, 0].tolist() == list(sparse) and found[:, 1].tolist() == pytest.approx(
                list(sparse.values()), rel=1e-3
            )


def test_greatest_weights():
    found = greatest_weights(np.array([5, 6, 5, 0]), np.array([0.5, 0.0, 0.75, 9.0]), frozenset((0,)))
    assert found.tolist() == [[5.0, 0.75]]


def test_heads_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(WeightsError, match=r"sparse_linear\.pt is not there"):
        M3Heads(tmp_path, HIDDEN, torch.device("cpu"), ())
    torch.save(torch.nn.Linear(HIDDEN, 2).state_dict(), tmp_path / "sparse_linear.pt")
    with pytest.raises(WeightsError, match="expected are"):
        M3Heads(tmp_path, HIDDEN, torch.device("cpu"), ())

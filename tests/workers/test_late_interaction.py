"""Late interaction and BGE-M3's heads against the formulas of their own code, written out here for one text at a time.

FlagEmbedding/inference/embedder/encoder_only/m3.py and finetune/embedder/encoder_only/m3/modeling.py (dense, sparse, colbert);
colbert/modeling/checkpoint.py and pylate/scores/scores.py (MaxSim).
"""

from itertools import accumulate

import pytest
import torch
import transformers
from encoder_cases import HIDDEN, POSITIONS, SMALL, pair, texts, their_hidden

from quire.workers.loading.weight_loader import WeightsError
from quire.workers.models.encoder import hidden_states
from quire.workers.pooling import late_interaction
from quire.workers.pooling.late_interaction import (
    ColBERTHead,
    M3Heads,
    expanded,
    greatest_weights,
    kept_tokens,
    maxsim,
    sparse_score,
)
from quire.workers.pooling.poolers import Spans
from quire.workers.pooling.sentence_transformers import LateInteraction, read_stanford_colbert

F = torch.nn.functional
CPU = torch.device("cpu")
UNUSED = (0, 1, 2, 3)


def vectors(*lengths, size=8):
    generator = torch.Generator().manual_seed(sum(lengths))
    return [F.normalize(torch.randn(n, size, generator=generator), dim=-1) for n in lengths]


def by_formula(query, document):
    return torch.stack([torch.stack([q @ d for d in document]).max() for q in query]).sum()


@pytest.mark.parametrize("at_once", [1 << 24, 40, 1])
def test_maxsim_equals_its_formula(at_once, monkeypatch):
    monkeypatch.setattr(late_interaction, "ELEMENTS_AT_ONCE", at_once)
    query, *documents = vectors(4, 9, 1, 30, 2)
    torch.testing.assert_close(maxsim(query, documents), torch.stack([by_formula(query, d) for d in documents]))


def test_maxsim_of_nothing():
    [query] = vectors(3)
    assert maxsim(query, []).tolist() == []
    assert maxsim(query, [query[:0], query]).tolist() == pytest.approx([0.0, 3.0])


def test_queries_are_filled_and_documents_lose_punctuation():
    late = LateInteraction(query_length=5)
    assert expanded([7, 8], late, mask_id=4) == [7, 8, 4, 4, 4]
    assert expanded([7, 8, 9, 10, 11, 12], late, mask_id=4) == [7, 8, 9, 10, 11]
    assert expanded([7, 8], LateInteraction(query_length=5, expands=False), mask_id=4) == [7, 8]
    assert kept_tokens([7, 3, 8, 3], {3}) == [0, 2]


def test_settings_of_colberts_own_code(tmp_path):
    assert read_stanford_colbert(tmp_path) is None
    (tmp_path / "artifact.metadata").write_text('{"query_maxlen": 32, "doc_maxlen": 180, "mask_punctuation": true}')
    late = read_stanford_colbert(tmp_path)
    assert (late.query_length, late.document_length, late.expands) == (32, 180, True)
    assert "," in late.skiplist and (late.query_prefix, late.document_prefix) == ("[unused0]", "[unused1]")


def spans_of(rows):
    return Spans.of(torch.tensor([0, *accumulate(map(len, rows))], dtype=torch.int32))


def test_colberts_head():
    rows, weight = texts([4, 7]), torch.randn(8, HIDDEN)
    hidden = torch.randn(11, HIDDEN)
    got = ColBERTHead(weight)(hidden, spans_of(rows))
    for own, states in zip(got, hidden.split([4, 7]), strict=True):
        torch.testing.assert_close(own, F.normalize(states @ weight.T, p=2, dim=-1))


# -------------------------------------------------------------------------------------------------------------- BGE-M3
@pytest.fixture(scope="module")
def m3(tmp_path_factory):
    """A tiny BGE-M3: its weights are files of torch.save alone."""
    folder = tmp_path_factory.mktemp("m3")
    fields = {**SMALL, "max_position_embeddings": POSITIONS + 2, "pad_token_id": 1, "type_vocab_size": 1}
    theirs, ours = pair(transformers.XLMRobertaModel, transformers.XLMRobertaConfig(**fields), folder)
    generator = torch.Generator().manual_seed(9)
    for name, size in (("sparse_linear", 1), ("colbert_linear", HIDDEN)):
        linear = torch.nn.Linear(HIDDEN, size)
        for parameter in linear.parameters():
            parameter.data.normal_(0.0, 0.5, generator=generator)
        torch.save(linear.state_dict(), folder / f"{name}.pt")
    return folder, theirs, ours


def test_all_three_kinds_of_one_pass(m3):
    folder, theirs, ours = m3
    heads = M3Heads(folder, HIDDEN, CPU, UNUSED)
    rows = texts([1, 6, 30])
    rows[1][2] = rows[1][4] = rows[1][1]  # a token three times
    rows[2][0] = UNUSED[2]
    spans, hidden = spans_of(rows), hidden_states(ours, rows)
    dense, sparse, tokens = heads.dense(hidden, spans), heads.sparse(hidden, spans, rows), heads.tokens(hidden, spans)
    linears = [torch.load(folder / f"{name}.pt", weights_only=True) for name in ("sparse_linear", "colbert_linear")]
    for i, row in enumerate(rows):
        states = their_hidden(theirs, row)
        torch.testing.assert_close(dense[i], F.normalize(states[0], dim=-1), rtol=1e-4, atol=1e-5)
        weights = torch.relu(F.linear(states, linears[0]["weight"], linears[0]["bias"])).squeeze(1).tolist()
        expected = {}
        for token, weight in zip(row, weights, strict=True):
            if token not in UNUSED and weight > 0:
                expected[token] = max(weight, expected.get(token, 0.0))
        assert sparse[i].keys() == expected.keys()
        assert [sparse[i][token] for token in expected] == pytest.approx(list(expected.values()), rel=1e-3, abs=1e-5)
        own = F.normalize(F.linear(states[1:], linears[1]["weight"], linears[1]["bias"]), dim=-1)
        torch.testing.assert_close(tokens[i], own, rtol=1e-4, atol=1e-5)


def test_sparse_scores():
    assert greatest_weights([5, 6, 5, 0], [0.5, 0.0, 0.75, 9.0], UNUSED) == {5: 0.75}
    assert sparse_score({5: 0.5, 6: 2.0}, {5: 4.0, 7: 1.0}) == 2.0


def test_heads_that_do_not_fit_are_refused(m3, tmp_path):
    with pytest.raises(WeightsError, match=r"sparse_linear\.pt is not there"):
        M3Heads(tmp_path, HIDDEN, CPU, UNUSED)
    torch.save(torch.nn.Linear(HIDDEN, 2).state_dict(), tmp_path / "sparse_linear.pt")
    with pytest.raises(WeightsError, match="expected are"):
        M3Heads(tmp_path, HIDDEN, CPU, UNUSED)

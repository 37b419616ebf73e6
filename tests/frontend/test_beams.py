"""Beam search's arithmetic against a plain search that never ends early, over made-up models of a few tokens."""

import hashlib
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.frontend.client.beams import Beams

PROMPT = [1, 2]


def distribution(tokens: tuple[int, ...], vocab: int, seed: int, impossible: bool) -> np.ndarray:
    """Log-probabilities of the next token; coarse, so that some are equal."""
    digest = hashlib.blake2b(repr((tokens, seed)).encode(), digest_size=vocab).digest()
    weights = np.frombuffer(digest, np.uint8) // 16 + (0 if impossible else 1)
    with np.errstate(divide="ignore"):
        return np.log(weights / max(1, weights.sum())).astype(np.float32)


def candidates(row: np.ndarray, num: int) -> tuple[np.ndarray, np.ndarray]:
    """As an engine gives them: likeliest first, and beyond the vocabulary nothing."""
    order = np.argsort(-row, kind="stable")[:num].astype(np.int32)
    missing = num - len(order)
    return np.pad(order, (0, missing)), np.pad(row[order], (0, missing), constant_values=-np.inf)


def plain_search(next_row, width, max_tokens, ends, penalty, num) -> list[float]:
    """Scores of the best; every step is made."""
    running, completed = [(tuple(PROMPT), 0.0)], []

    def score(beam):
        tokens, total = beam
        return total / (len(tokens) - (tokens[-1] in ends)) ** penalty

    for _ in range(max_tokens):
        extended = []
        for tokens, total in running:
            for token, logprob in zip(*candidates(next_row(tokens), num), strict=True):
                if math.isfinite(logprob):
                    beam = ((*tokens, int(token)), total + float(logprob))
                    (completed if token in ends else extended).append(beam)
        running = sorted(extended, key=lambda beam: -beam[1])[:width]
    return sorted((score(beam) for beam in [*completed, *running]), reverse=True)[:width]


@settings(max_examples=200, deadline=None)
@given(
    width=st.integers(1, 5),
    max_tokens=st.integers(1, 7),
    vocab=st.integers(2, 8),
    ends=st.sets(st.integers(0, 3), max_size=2),
    penalty=st.sampled_from([0.0, 1.0, 0.5, 2.0, -1.0, 20.0]),
    seed=st.integers(0, 1000),
    impossible=st.booleans(),
)
def test_it_finds_what_a_plain_search_finds_and_ends_no_later(width, max_tokens, vocab, ends, penalty, seed, impossible):
    def next_row(tokens):
        return distribution(tokens, vocab, seed, impossible)

    beams = Beams(
        np.array(PROMPT, np.int32), width=width, max_tokens=max_tokens, end_ids=ends, length_penalty=penalty, num_logprobs=2
    )
    steps = 0
    while not beams.done:
        beams.advance([candidates(next_row(tuple(beam.ids.tolist())), 2 * width) for beam in beams.running])
        assert len(beams.running) <= width and len(beams.completed) <= width
        steps += 1
    assert steps <= max_tokens
    best = beams.best()
    want = plain_search(next_row, width, max_tokens, ends, penalty, 2 * width)
    np.testing.assert_allclose([beam.score for beam in best], want, rtol=1e-9, atol=1e-12)
    for beam in best:
        output = beam.ids.tolist()[len(PROMPT) :]
        assert beam.ended == (output[-1] in ends) and ends.isdisjoint(output[:-1])
        rows = beam.logprobs()
        assert len(rows) == len(output) and all(len(row.top_ids) == 4 * min(2, 2 * width) for row in rows)
        assert math.isclose(sum(row.logprob for row in rows), beam.cum_logprob, abs_tol=1e-9)


def test_early_stopping_ends_with_the_first_completed():
    def row(tokens):
        return np.log(np.array([0.3, 0.6, 0.1], np.float32))  # 0 ends, and is never the likeliest

    for early, most in ((True, 2), (False, 9)):
        beams = Beams(np.array(PROMPT, np.int32), width=1, max_tokens=9, end_ids={0}, length_penalty=3.0, early_stopping=early)
        while not beams.done:
            beams.advance([candidates(row(beam.ids), 2) for beam in beams.running])
        assert beams.length <= most
    assert beams.length > 2

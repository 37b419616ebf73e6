"""The section `late_queries` of a plan: the vectors of queries that this step's documents are compared with (MaxSim).

A step brings the vectors of each query once, with the prefill rows of its documents. Nothing is kept between steps, so a
document that is computed again, on other workers or by another replica, has all that it needs.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

MAX_QUERY_BYTES = 1 << 18  # of a query's vectors: 512 tokens of 128 elements


class LateQuery(NamedTuple):
    """rows: int32 [n], indices of prefill rows. vectors: float32, all elements of the query's tokens."""

    rows: np.ndarray
    vectors: np.ndarray


def encode_queries(rows_of: Mapping[bytes, Sequence[int]]) -> np.ndarray:
    """The words of the section. rows_of: the prefill rows of each query, by the bytes of its vectors."""
    parts = list[np.ndarray]()
    for data, rows in rows_of.items():
        parts += [np.array([len(rows), len(data) // 4, *rows], np.int32), np.frombuffer(data, np.int32)]
    return np.concatenate(parts)


def decode_queries(words: np.ndarray) -> list[LateQuery]:
    """The queries of a section; arrays are copies, since the plan's place in the ring is given back."""
    found, at = list[LateQuery](), 0
    while at < len(words):
        count, size = words[at : at + 2].tolist()
        middle, end = at + 2 + count, at + 2 + count + size
        found.append(LateQuery(words[at + 2 : middle].copy(), words[middle:end].copy().view(np.float32)))
        at = end
    return found

"""Requests for vectors and scores in soak.py's mix (`--vectors`), for a server that generates and embeds, or embeds alone.

Their answers come in one piece: each text must have a vector of length 1, and each document a score.
"""

import json
import math
import random
from typing import Any

VECTORS, RANKING = "/v1/embeddings", "/rerank"
_MOST_TEXTS = 64


def body(path: str, model: str, chance: random.Random) -> dict[str, Any]:
    """A request for vectors, or for a ranking, of 1 to 64 texts."""
    texts = [_text(chance) for _ in range(chance.randint(1, _MOST_TEXTS))]
    if path == VECTORS:
        return {"model": model, "input": texts}
    return {"model": model, "query": _text(chance), "documents": texts, "return_documents": False}


def _text(chance: random.Random) -> str:
    return " ".join(str(chance.randrange(10_000)) for _ in range(chance.randint(1, 20)))


def problem(sent: dict[str, Any], answer: bytes) -> str:
    """The fault of the answer to such a body, or ""."""
    found = json.loads(answer)
    if "documents" in sent:
        scores = sorted(each["index"] for each in found["results"])
        return "" if scores == list(range(len(sent["documents"]))) else "a document has no score"
    vectors = [each["embedding"] for each in found["data"]]
    if len(vectors) != len(sent["input"]):
        return f"{len(vectors)} vectors of {len(sent['input'])} texts"
    return "" if all(abs(math.hypot(*vector) - 1.0) < 1e-3 for vector in vectors) else "a vector has not the length 1"

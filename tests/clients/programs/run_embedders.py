"""`make test-clients` runs it, too: client packages for vectors and rankings against a server with the bundled embedder.

    python tests/clients/programs/run_embedders.py [NAME ...]

Each gets the vectors of a few texts, by OpenAI's or Cohere's route (embed) and by text-embeddings-inference's (tei), and the
order of the texts for a query (rerank); all must equal those of a plain request. The status is 1 if anything does not.
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

import installed
import numpy as np
from run_clients import KEY, MODEL, ask_script
from serving import SMALL, Served

TEXTS = ["A quire is a gathered set of pages.", "The binder folds the sheets once.", "x"]
PARTS = {"cohere": ("embed", "rerank"), "langchain": ("embed", "tei")}  # all other clients have all three
ALL = ("embed", "tei", "rerank")


def wrong_with(part: str, value: Any, vectors: np.ndarray) -> str:
    """Nothing, or what is wrong. vectors: those of the texts, by a plain request."""
    if part == "rerank":
        order = np.argsort(-(vectors @ vectors[0]))[:2].tolist()
        return "" if value == order else f"the order is {value}, expected {order}"
    found = np.array(value, np.float64)
    if found.shape != vectors.shape:
        return f"vectors of the shape {found.shape}, expected {vectors.shape}"
    apart = float(np.abs(found - vectors).max())
    return "" if apart < 1e-6 else f"vectors are {apart:.2g} off"


def run(names: list[str]) -> bool:
    bad = []
    with Served("--runner", "pooling", *SMALL, "--api-key", KEY, "--served-model-name", MODEL) as server:
        server.ready()
        answer = server.ask("POST", "/v1/embeddings", {"input": TEXTS}, {"Authorization": f"Bearer {KEY}"}).json()
        vectors = np.array([each["embedding"] for each in answer["data"]])
        for name in names:
            words = [installed.python_of(f"embed-{name}"), installed.HERE / f"embed_{name.replace('-', '_')}.py"]
            found = ask_script(words, server.url, json.dumps(TEXTS))
            said = {part: wrong_with(part, found[part], vectors) for part in PARTS.get(name, ALL)}
            cells = "".join(f"{('NO' if said[part] else 'yes') if part in said else '-':10}" for part in ALL)
            print(f"{name:16}{found['version']:20}{cells}", *filter(None, said.values()), flush=True)
            bad += [name] * any(said.values())
        assert server.end() == 0, server.output
    print(f"{len(names) - len(bad)} of {len(names)} work" + (f"; not {', '.join(bad)}" if bad else ""))
    return not bad


if __name__ == "__main__":
    sys.exit(not run(sys.argv[1:] or [name.removeprefix("embed-") for name in installed.EMBEDDERS]))

"""Tries a tiny model of every entry of transformers' causal language models: `python tests/try_transformers.py [TYPE ...]`.

Without types it tries all. It writes docs/tools/transformers_models.json, which the documentation shows and tests compare with.
Prints a line a model and the sums; exits with 1 if one gives other tokens than transformers. Ten minutes on two cores.
"""

import collections
import json
import sys
import warnings
from pathlib import Path

import transformers

RESULTS = Path(__file__).parents[1] / "docs/tools/transformers_models.json"


def main() -> int:
    warnings.filterwarnings("ignore")
    sys.path.insert(0, str(Path(__file__).parent / "support"))
    import transformers_tiny

    transformers_tiny.quiet()
    asked = sys.argv[1:]
    rows: dict[str, dict[str, str]] = {}
    for model_type in asked or transformers_tiny.TYPES:
        found = transformers_tiny.outcome(model_type)
        rows[model_type] = {"model": found.model, "result": found.result, "reason": found.reason}
        print(found.result, model_type, found.model, found.distinct or "", found.reason[:300], flush=True)
    sums = collections.Counter(row["result"] for row in rows.values())
    print(dict(sums))
    if not sums["wrong"]:
        if asked:
            rows = json.loads(RESULTS.read_text())["models"] | rows
        RESULTS.write_text(json.dumps({"transformers": transformers.__version__, "models": rows}, indent=1) + "\n")
    return 1 if sums["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())

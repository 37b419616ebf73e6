"""The table of docs/transformers-models.md: the results of tests/try_transformers.py for each model."""

import json
from pathlib import Path

from markdown import code, table

RESULTS = Path(__file__).parent / "transformers_models.json"


def models() -> str:
    found = json.loads(RESULTS.read_text())
    rows = found["models"]
    equal = sorted(name for name, row in rows.items() if row["result"] == "equal")
    others = {name: row for name, row in sorted(rows.items()) if row["result"] != "equal"}
    head = f"{len(equal)} of {len(rows)} entries of transformers {found['transformers']} give transformers' tokens:"
    return "\n\n".join(
        (
            head,
            ", ".join(map(code, equal)) + ".",
            "The others do not, for these reasons:",
            table(("`model_type`", "class", "why not"), ((code(n), code(r["model"]), r["reason"]) for n, r in others.items())),
        )
    )

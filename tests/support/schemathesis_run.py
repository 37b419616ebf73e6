"""`schemathesis run` against a running server: all of its checks and phases, with a seed that is printed.

By hand: python tests/support/schemathesis_run.py URL [--api-key KEY] [--seed N] [--max-examples N]. A failure repeats with the
same seed, schemathesis' version and /openapi.json.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

CONFIG = Path(__file__).parents[1] / "clients" / "schemathesis.toml"


def run(url: str, seed: int, max_examples: int, folder: str, key: str = "", phases: str = "") -> tuple[int, int, str]:
    """Exit code, number of cases, and what it wrote; `folder` takes what it leaves behind."""
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(CONFIG), "run", f"{url}/openapi.json"]
    command += ["--seed", str(seed), "--max-examples", str(max_examples), "--continue-on-failure", "--no-color"]
    command += ["--header", f"Authorization: Bearer {key}"] if key else []
    command += ["--phases", phases] if phases else []
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    cases = re.search(r"(\d+) generated", done.stdout)
    return done.returncode, int(cases[1]) if cases else 0, done.stdout + done.stderr


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-examples", type=int, default=400, help="for each route and phase")
    given = parser.parse_args()
    code, number, output = run(given.url, given.seed, given.max_examples, ".", given.api_key)
    print(output, f"{number} cases with seed {given.seed}", sep="\n")
    sys.exit(code)

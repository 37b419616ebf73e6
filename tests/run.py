"""Run pytest, and what failed once more alone: `python tests/run.py ARGS of pytest`.

Some tests wait for processes, and a machine with too much else to do can keep them waiting beyond any bound. So up to
MOST_AGAIN tests that failed run once more, one after the other. A test that passes then is named as unsteady and does not
fail the run; it deserves a look. If more failed, or one fails again, the run has failed. The status is pytest's.
"""

import json
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

MOST_AGAIN = 4
FAILED = 1  # pytest's status where tests failed; others say that it could not run them


def run(args: list[str], cache: str) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", "-o", f"cache_dir={cache}", *args]).returncode


def failed_tests(cache: str) -> list[str]:
    """The ids of the tests, or the files that could not be imported, that failed in the run with this cache folder."""
    kept = Path(cache, "v", "cache", "lastfailed")
    return list(json.loads(kept.read_text())) if kept.exists() else []


def main(args: list[str]) -> int:
    with tempfile.TemporaryDirectory() as cache:
        status = run(args, cache)
        failed = failed_tests(cache)
        if status != FAILED or not 0 < len(failed) <= MOST_AGAIN:
            return status
        print(f"Once more, alone: {' '.join(failed)}", flush=True)
        kept = [part for option, value in pairwise(args) if option in ("-m", "-o") for part in (option, value)]
        again = run([*kept, *failed], cache)
        unsteady = [name for name in failed if name not in failed_tests(cache)]
    if unsteady:
        print(f"UNSTEADY, failed at first and passed alone: {' '.join(unsteady)}", flush=True)
    return again


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

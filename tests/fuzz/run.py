"""The fuzzer: `make fuzz`, or `python tests/fuzz/run.py --minutes 10 --seed 7 --target bodies`.

Each target gets an equal share of the time, in a worker process of its own, which tries the target's kept cases and then
new ones. A worker that dies, or hangs at a case, is a finding, too; the next one goes on behind the case. A finding is
written to a file below build/fuzz/, and the command that tries it again is printed. Once it is mended, its file goes to
tests/fuzz/corpus/TARGET/.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))  # run as a script
sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz.case import Case
from fuzz.worker import NOTE_BYTES, Note, report, target_of, try_one

TARGETS = ("http_reader", "bodies", "messages", "parsers", "grammars", "batches", "folders", "other_models", "settings")
HANG_S = 60.0  # that a case may take by the clock, on a busy machine; targets have tighter bounds of CPU time
_LOOK_S = 0.2


def run_target(name: str, seed: int, first: int, seconds: float) -> int:
    """Run a target's workers until its time is over. Returns 1 if there was a finding."""
    until, found = time.monotonic() + seconds, 0
    with tempfile.NamedTemporaryFile(prefix="quire-fuzz-") as file:
        file.truncate(NOTE_BYTES)
        note = Note(file.name)
        while True:
            left = max(until - time.monotonic(), 1.0)
            command = [sys.executable, "-m", "fuzz.worker", name, file.name, str(seed), str(first), str(left)]
            code = _watched(subprocess.Popen(command, env=_environment()), note)
            if code in (0, 1):
                return found or code
            found = 1
            number, data = note.read()
            how = "it hangs" if code is None else f"its process ended with status {code}"
            print(f"\n{name}: case {number} of seed {seed}", flush=True)
            report(target_of(name), Case.decode(data), "", how)
            first = number + 1
            if number < 0 or time.monotonic() >= until:
                return found


def _environment() -> dict[str, str]:
    paths = [*sys.path[:2], *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONFAULTHANDLER": "1", "OMP_NUM_THREADS": "1"}


def _watched(worker: subprocess.Popen[bytes], note: Note) -> int | None:
    """Wait for the worker's end; None if it hung at a case, and was killed."""
    last, since = note.read(), time.monotonic()
    while (code := worker.poll()) is None:
        time.sleep(_LOOK_S)
        if (now := note.read()) != last:
            last, since = now, time.monotonic()
        elif time.monotonic() - since > HANG_S:
            worker.kill()
            worker.wait()
            return None
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description="Try hostile input of every kind.")
    parser.add_argument("--minutes", type=float, default=10.0, help="of all targets together (10)")
    parser.add_argument("--seed", type=int, help="of the cases; a random one if it is not given")
    parser.add_argument("--target", choices=TARGETS, action="append", help="only this one; may be given several times")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case; 0 begins with the kept ones")
    parser.add_argument("--case", type=Path, help="try this file alone; its name, or its folder's, begins with the target's")
    args = parser.parse_args()
    if args.case is not None:
        names = [name for name in TARGETS if args.case.name.startswith(f"{name}-") or args.case.parent.name == name]
        name = names[0] if names else (args.target or TARGETS)[0]
        return try_one(target_of(name), Case.decode(args.case.read_bytes()))
    targets = args.target or TARGETS
    seed = args.seed if args.seed is not None else random.randrange(1 << 32)
    print(f"fuzzing for {args.minutes:.3g} minutes, seed {seed} (SEED={seed} makes the same cases again)", flush=True)
    found = [name for name in targets if run_target(name, seed, args.first, 60 * args.minutes / len(targets))]
    print(f"seed {seed}: {'findings in ' + ', '.join(found) if found else 'no findings'}", flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

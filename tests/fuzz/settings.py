"""Target: files that an operator writes: limits of API keys (--limits), and flags (--config). Any bytes are these, or an error.

An error is one line that names the file. It ends `quire serve` with status 2, as any wrong flag does.
"""

import contextlib
import functools
import hashlib
import io
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
from fuzz.case import Case, Draw, Target, must
from fuzz.mutate import ODD_NUMBERS, ODD_TEXTS, mutated_bytes
from launch_lines import parsed

from quire.frontend.http.limits.key_limits import FIELDS, KeyLimits
from quire.frontend.http.limits.limits_file import read_limits

_A, _B = (hashlib.sha256(key).hexdigest() for key in (b"a", b"b"))
_LIMITS = f"""# limits
{_A}: search
{_B.upper()}: {{name: nightly, weight: 0.5, max_running: 8, max_waiting: 0, best_priority: 5, cache_salt: ours}}
search:
  weight: 4
  admin: true
  max_files: 10
  max_files_mib: 3
"*": {{max_running: 2}}
"""
_FLAGS = """model: Qwen/Qwen3-0.6B
port: 9000
max_model_len: 8k
served-model-name: [a, b]
enable-prefix-caching: false
hf-overrides: {rope_scaling: {factor: 2.0}}
override-generation-config: '{"temperature": 0.5}'
allowed-origins: ["https://a"]
seed: null
uvicorn-log-level: warning
limits: /nowhere
"""
_WORDS = [
    b"&a ",
    b"*a",
    b"<<: *a",
    b"!!python/object/apply:os.system ['true']",
    b"!!binary ",
    b"!!set ",
    b"!!timestamp ",
    b"? ",
    b"- ",
    b"|\n ",
    b"---\n",
    b"...\n",
    b"[",
    b"{",
    b"'",
    b'"',
    b": ",
    b"\t",
    b"\xff",
    b"\xe2\x80\xa8",
    b"0o17",
    b"1_000",
    b"2026-01-01",
    b".inf",
    b".nan",
    b"~",
    b"yes",
    b"*" * 40,
    b"[" * 2000,
    *(str(number).encode() for number in ODD_NUMBERS),
    *(text.encode(errors="replace") for text in ODD_TEXTS),
    *(name.encode() for name in FIELDS),
]


def seeds() -> Sequence[Case]:
    return [Case({"kind": "limits"}, _LIMITS.encode()), Case({"kind": "flags"}, _FLAGS.encode())]


def mutate(draw: Draw, case: Case, others: Sequence[Case]) -> Case:
    lines = case.payload.split(b"\n")
    if draw.random() < 0.5:
        at = draw.randrange(len(lines))
        key, separator, value = lines[at].partition(b": ")
        lines[at] = (
            key + separator + (draw.choice(_WORDS) if separator and draw.random() < 0.7 else mutated_bytes(draw, value, _WORDS))
        )
        return Case(case.head, b"\n".join(lines))
    return Case(case.head, mutated_bytes(draw, case.payload, _WORDS)[: 64 << 10])


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="quire-fuzz-")


def check(case: Case) -> None:
    path = Path(_folder().name) / "file.yaml"
    path.write_bytes(case.payload)
    if case.head["kind"] == "limits":
        _check_limits(path)
    else:
        _check_flags(path)


def _check_limits(path: Path) -> None:
    try:
        limits = read_limits(str(path))
    except ValueError as error:
        must(str(path) in str(error) and "\n" not in str(error), "an error that is no line about the file:", error)
        return
    must(msgspec.json.decode(msgspec.json.encode(limits), type=KeyLimits) == limits, "limits that do not travel:", limits)
    for owner in ("", _A, _B, "c" * 64):
        limits.access(owner)
        limits.files(owner)


def _check_flags(path: Path) -> None:
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            parsed("--config", str(path))
        except SystemExit as end:
            must(end.code == 2 and "Traceback" not in said.getvalue(), "an end without an error:", end.code, said.getvalue())
            must(str(path) in said.getvalue(), "an error that does not name the file:", said.getvalue())


TARGET = Target("settings", seeds, mutate, check)

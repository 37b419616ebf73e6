"""Traces the lines of Quire's own files that this process executes, for tests/test_main_path.py.

Python imports this file at its start from a folder on PYTHONPATH, so every process of a server is traced from its first line
on. `sys.settrace` is used because `sys.monitoring` needs Python 3.12. The environment variable LINE_TRACE names a folder: the
phase is the last line of `phases` there, and what each phase executed is written there, a file for each process and phase.
"""

import os
import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

FOLDER = Path(os.environ["LINE_TRACE"])
ROOT = str(Path(__file__).resolve().parents[3]) + os.sep
ROOMS = tuple(ROOT + room + os.sep for room in ("frontend", "enginecore", "workers", "kernels", "ipc"))
LOOK_S = 0.01

_files: dict[CodeType, str | None] = {}  # a code object's file below the root, None if it is not Quire's
_lines: dict[str, set[int]] = defaultdict(set)  # of the phase that runs


def _file(code: CodeType) -> str | None:
    path = os.path.realpath(code.co_filename)
    return path.removeprefix(ROOT) if path.startswith(ROOMS) else None


def _on_call(frame: FrameType, event: str, arg: Any) -> Any:
    code = frame.f_code
    try:
        file = _files[code]
    except KeyError:
        file = _files[code] = _file(code)
    return _on_line if file is not None else None


def _on_line(frame: FrameType, event: str, arg: Any) -> Any:
    if event == "line":
        _lines[_files[frame.f_code]].add(frame.f_lineno)
    return _on_line


def _follow_phases() -> None:
    """Write what each phase executed when the next one begins; the test waits for the file of every process."""
    global _lines
    phase, look = "start", threading.Event()
    while not look.wait(LOOK_S):
        now = (FOLDER / "phases").read_text().split()[-1]
        if now != phase:
            done, _lines = _lines, defaultdict(set)
            text = "".join(f"{file} {' '.join(map(str, lines))}\n" for file, lines in list(done.items()))
            part = FOLDER / f"{phase}.{os.getpid()}.part"
            part.write_text(text)
            part.rename(part.with_suffix(".lines"))
            phase = now


threading.Thread(target=_follow_phases, name="line-trace", daemon=True).start()
threading.settrace(_on_call)
sys.settrace(_on_call)

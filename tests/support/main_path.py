"""The lines that three streamed chats execute, in all processes of a server on a CPU: traced by line_trace/sitecustomize.py.

`PYTHONPATH=tests/support python tests/support/main_path.py` prints them by file.
"""

import os
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serving import SMALL, EventStream, Served, until

HERE = Path(__file__).parent
CHATS: tuple[dict[str, Any], ...] = (
    {"messages": [{"role": "user", "content": "What is 17 + 25?"}], "temperature": 0},
    {"messages": [{"role": "user", "content": "Sort: 4 2 9"}], "seed": 7, "stream_options": {"include_usage": True}},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}], "top_p": 0.9},
)


def chat(server: Served, body: dict[str, Any]) -> str:
    with EventStream(server.address, "/v1/chat/completions", {"stream": True, "max_tokens": 32, **body}) as stream:
        text = "".join(event["choices"][0]["delta"].get("content") or "" for event in stream if event["choices"])
        assert stream.done
    return text


ENDING_S = 1.0  # in which the last step in flight returns
LEAST_IDLE_S = 6.0  # batches are looked for every 5 s


class Phases:
    """Says to the traced processes which phase runs, and reads what they executed in one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "phases").write_text("start\n")

    def begin(self, phase: str) -> None:
        with (self.folder / "phases").open("a") as file:
            file.write(phase + "\n")

    def lines(self, phase: str, num_processes: int) -> dict[str, set[int]]:
        """By file, of a phase that another one has followed."""
        until(lambda: len(list(self.folder.glob(f"{phase}.*.lines"))) >= num_processes)
        found: dict[str, set[int]] = defaultdict(set)
        for part in self.folder.glob(f"{phase}.*.lines"):
            for line in part.read_text().splitlines():
                file, *numbers = line.split()
                found[file].update(map(int, numbers))
        return found


def trace_chats(folder: Path) -> dict[str, set[int]]:
    """The lines that the chats executed, by file, without those that an idle server executes in as long a time."""
    phases = Phases(folder)
    path = os.pathsep.join([str(HERE / "line_trace"), *filter(None, [os.environ.get("PYTHONPATH")])])
    with Served(*SMALL, env={"PYTHONPATH": path, "LINE_TRACE": str(folder)}) as server:
        server.ready()
        chat(server, CHATS[0])  # the process that renders templates starts with the first chat
        num_processes = 1 + len(server.pids())
        phases.begin("chats")
        phases.lines("start", num_processes)  # all have begun
        began = time.monotonic()
        texts = [chat(server, body) for body in CHATS]
        quiet = time.monotonic() + ENDING_S
        until(lambda: time.monotonic() >= quiet)
        phases.begin("idle")
        phases.lines("chats", num_processes)
        end = time.monotonic() + max(LEAST_IDLE_S, time.monotonic() - began)
        until(lambda: time.monotonic() >= end)  # an idle server, for as long
        phases.begin("end")
        chats, idle = (phases.lines(phase, num_processes) for phase in ("chats", "idle"))
    assert all(texts)
    return {file: left for file, lines in chats.items() if (left := lines - idle.get(file, set()))}


def named_files(readme: str) -> list[str]:
    """The files of the README's table of a request's way."""
    table = readme[readme.index("### A request's way through the code") : readme.index("### Where to change what")]
    return re.findall(r"`([\w/]+\.py)`", table)


def share(executed: Mapping[str, set[int]], files: list[str]) -> float:
    return sum(len(executed.get(file, ())) for file in files) / sum(map(len, executed.values()))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        executed = trace_chats(Path(folder))
    named = named_files((HERE.parents[1] / "README.md").read_text())
    for file, lines in sorted(executed.items(), key=lambda item: -len(item[1])):
        print(f"{len(lines):5} {'named' if file in named else '     '} {file}")
    total = sum(map(len, executed.values()))
    print(f"{total} lines in {len(executed)} files; the {len(named)} that README names hold {share(executed, named):.0%}")


if __name__ == "__main__":
    main()

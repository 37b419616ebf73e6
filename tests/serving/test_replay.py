"""Streams through kills of workers and engines: each gets the tokens of a run without kills, and none gets an error.

quire serve (HTTP) ── quire.enginecore ── quire.workers, alone, as two ranks, and as two engines
"""

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from serving import SMALL, EventStream, Served, until

pytestmark = pytest.mark.slow

WORKER, CORE = "quire.workers", "quire.enginecore"
NUM_STREAMS = 32
SHAPES = {
    "one worker": ((), 4, 3),
    "two ranks": (("-tp", "2"), 2, 1),
    "two engines": (("-dp", "2"), 2, 2),
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "ages": {"type": "array", "items": {"type": "integer"}, "minItems": 5, "maxItems": 30},
    },
    "required": ["name", "ages"],
    "additionalProperties": False,
}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 400, "min_tokens": 400},
    {"temperature": 1, "max_tokens": 400, "min_tokens": 400},
    {"temperature": 0.8, "max_tokens": 300, "min_tokens": 300, "top_p": 0.9, "repetition_penalty": 1.2, "logprobs": 2},
    {
        "temperature": 1,
        "max_tokens": 300,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    },
]


def request(number: int) -> dict[str, Any]:
    words = [
        "Once",
        "upon",
        "a",
        "time",
        "there",
        "was",
        "a",
        "little",
        "dog",
        "that",
        "liked",
        "to",
        "run",
        "in",
        "the",
        "garden",
    ]
    return {"prompt": " ".join(words[number % 7 :]), "seed": number, **KINDS[number % len(KINDS)]}


class Streams:
    """NUM_STREAMS clients, each of which sends its own request again and again."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.expected = self._once()
        self.wrong: list[str] = []
        self.num_right = 0
        self.longest_gap_s = 0.0
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(NUM_STREAMS)]

    def _stream(self, number: int) -> EventStream:
        return self.served.stream(**request(number))

    def _once(self) -> list[str]:
        texts = [""] * NUM_STREAMS

        def run(number: int) -> None:
            with self._stream(number) as stream:
                texts[number] = stream.text()

        threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(NUM_STREAMS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(texts)
        return texts

    def _run(self, number: int) -> None:
        while not self._is_over.is_set():
            text, is_done, last = "", False, time.monotonic()
            try:
                with self._stream(number) as stream:
                    for event in stream:
                        now = time.monotonic()
                        gap, last = now - last, now
                        with self._lock:
                            self.longest_gap_s = max(self.longest_gap_s, gap)
                        text += "".join(choice["text"] for choice in event.get("choices", ())) if "error" not in event else "!"
                        if "error" in event:
                            self.wrong.append(f"{number}: {event['error']}")
                    is_done = stream.done
            except AssertionError as error:  # the head's status: refused while no engine is there
                if "engine_down" not in str(error):
                    self.wrong.append(f"{number}: {error}")
                until(lambda: self.served.health() == 200)
                continue
            if is_done and text == self.expected[number]:
                self.num_right += 1
            else:
                self.wrong.append(f"{number}: {text[:60]!r} for {self.expected[number][:60]!r} (done: {is_done})")

    def __enter__(self) -> "Streams":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()


@pytest.fixture(params=list(SHAPES), ids=lambda name: name.replace(" ", "-"))
def shape(request: pytest.FixtureRequest) -> Iterator[tuple[Served, int, int]]:
    flags, num_worker_kills, num_core_kills = SHAPES[request.param]
    small = [*SMALL[:4], "--max-num-seqs", str(NUM_STREAMS), "--cpu-kv-cache-gib", "0.2", "--max-queue-s", "0"]
    with Served(*small, *flags) as served:
        yield served.ready(), num_worker_kills, num_core_kills
        served.end()


def victims(served: Served, module: str) -> list[int]:
    """The processes of this kind; waits until there is one."""
    found: list[int] = []
    until(lambda: found.extend(served.pids(module)) or found)
    return found


def test_streams_outlive_workers_and_engines(shape: tuple[Served, int, int]) -> None:
    served, num_worker_kills, num_core_kills = shape
    rng = random.Random(3)
    kills = [WORKER] * num_worker_kills + [CORE] * num_core_kills
    rng.shuffle(kills)
    with Streams(served) as streams:
        for module in kills:
            until(lambda: served.health() == 200 and served.pids(WORKER))
            before, more = served.metric("generation_tokens_total"), rng.randint(1, 300)  # until a random moment
            # a new core counts from 0
            until(lambda before=before, more=more: not 0 <= served.metric("generation_tokens_total") - before < more)
            pid = rng.choice(victims(served, module))
            with contextlib.suppress(psutil.NoSuchProcess):
                children = psutil.Process(pid).children() if module == CORE else []
                os.kill(pid, signal.SIGKILL)
                psutil.wait_procs(children, 10.0)
        until(lambda: served.health() == 200)
        started = streams.num_right
        until(lambda: streams.num_right >= started + NUM_STREAMS or streams.wrong)
    print(f"{len(kills)} kills: {streams.num_right} streams right, the longest gap {streams.longest_gap_s:.1f} s")
    assert not streams.wrong
    assert served.metric("num_replays_total") > 0

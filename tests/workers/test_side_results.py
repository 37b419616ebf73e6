"""When a worker sends a step's results beside its tokens: with another step launched, if one is there and needs no masks."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")

from quire.ipc.messages.workers import PromptLogprobsOfRow
from quire.ipc.step.plan_ring import KIND_PLAN, KIND_SHUTDOWN
from quire.ipc.step.sections import HEADER
from quire.workers.outputs.side_results import SideResultSender
from quire.workers.worker import Worker

RESULT = PromptLogprobsOfRow(0, b"", b"", b"", b"")


def events_of(records: str, monkeypatch: pytest.MonkeyPatch, ring: object = "a ring") -> list[str]:
    """What a worker does that reads `records`: P a plan with such results, M one with masks, too, - nothing in time."""
    events, numbers, left = [], iter(range(1, 100)), iter(records)
    monkeypatch.setattr(sys, "setswitchinterval", lambda _: None)

    def read(timeout_s, spin_s):
        record = next(left, "end")
        if record == "-":
            events.append("waits" if timeout_s else "looks")
            return None
        plan = np.zeros(HEADER.width, np.int32)
        plan[HEADER.at["world_size"]] = 1
        plan[HEADER.at["step"]], plan[HEADER.at["num_mask_rows"]] = (next(numbers), record == "M") if record in "PM" else (0, 0)
        return KIND_PLAN if record in "PM" else KIND_SHUTDOWN, plan

    def step(words, masks):
        events.append(f"step {words[HEADER.at['step']]}")
        return [SimpleNamespace(message=lambda: RESULT)]

    loop = object.__new__(Worker)
    loop.engine = SimpleNamespace(device="cpu", world_size=1, collective_timeout_s=10.0, data_parallel_size=1)
    loop.config, loop.ring = SimpleNamespace(rank=0), ring
    loop.link = SimpleNamespace(send=lambda message: events.append(f"sends {message.step}"))
    loop.profiler, loop.reader = SimpleNamespace(is_active=False), SimpleNamespace(read=read)
    idle = {"capture_ahead": lambda: False, "capture_masked_sampling_graph": lambda: None, "pipeline": None}
    device, model = SimpleNamespace(signal=lambda: None, waited_s=lambda: 0.0), SimpleNamespace(items=None)
    loop._serve(SimpleNamespace(step=step, device=device, model=model, **idle))
    return events


def test_they_follow_the_next_launch_or_go_at_once_where_there_is_none(monkeypatch):
    assert events_of("PP--P-", monkeypatch) == [
        "step 1", "step 2", "sends 1", "looks", "sends 2", "waits", "step 3", "looks", "sends 3",
    ]  # fmt: skip


def test_a_step_with_masks_that_come_of_their_tokens_waits_for_them(monkeypatch):
    assert events_of("PM-", monkeypatch) == ["step 1", "sends 1", "step 2", "looks", "sends 2"]


def test_other_ranks_send_nothing(monkeypatch):
    assert events_of("PP-", monkeypatch, ring=None) == ["step 1", "step 2", "waits"]
    sender = SideResultSender(None, 1, sends=False)
    sender.add(3, [RESULT])
    assert not sender

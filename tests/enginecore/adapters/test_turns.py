"""Loads of adapters on demand: few of one key at a time, whichever frontends it asks through."""

import numpy as np
import pytest
from adapter_core import Core
from adapter_folders import write_folder
from core_by_hand import EPOCH
from hypothesis import given
from hypothesis import strategies as st

from quire.enginecore.adapters.turns import MOST_LOADS, LoadTurns
from quire.ipc.messages.frontend import Utility, UtilityResult
from quire.ipc.messages.utilities import AdapterLoaded, FindAdapter, UtilityFailed


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3)), max_size=60))
def test_any_history_of_turns(events):
    turns, under_way, order, asked = LoadTurns(6), {"a": [], "b": []}, {"a": [], "b": []}, {"a": 0, "b": 0}
    for key, kind in events:
        if kind:
            number = asked[key]

            def work(over, key=key, number=number):
                under_way[key].append(over)
                order[key].append(number)

            waited = turns.num_waiting
            if turns.begin(key, work):
                asked[key] += 1
            else:
                assert waited == 6
        elif under_way[key]:
            under_way[key].pop(0)()
        turns.check()
        assert all(len(calls) <= MOST_LOADS for calls in under_way.values())
    assert all(numbers == sorted(numbers) for numbers in order.values())
    for key in "ab":
        while under_way[key]:
            under_way[key].pop()()
    turns.check()
    assert not turns.num_waiting and {key: len(numbers) for key, numbers in order.items()} == asked


@pytest.fixture
def core(tmp_path):
    made = Core(tmp_path, limits={"on_demand": True})
    for i in range(8):
        write_folder(tmp_path / f"a{i}")
    yield made
    made.close()


LATE = 1_000_000  # the id of a request


def find(core, frontend, number, name, key):
    frontend.send(Utility(EPOCH, number, FindAdapter(name, key)))


def test_a_key_has_two_loads_under_way_through_all_frontends(core):
    loads = core.workers.kept = []
    other = core.frontend()
    for i in range(6):
        find(core, core.asker if i % 2 else other, i, f"a{i}", "greedy")
    core.until(lambda: len(loads) == 2)
    find(core, other, 10, "a7", "modest")
    core.until(lambda: len(loads) == 3)
    for _ in range(50):
        core.turn()
    folders = [request.plan.file.folder for request in loads]
    assert len(loads) == 3 and folders[2].endswith("a7"), "the other key does not wait for the greedy one"
    core.workers.kept = None
    for request in loads:
        core.workers.control(request)
    found = set()
    for frontend, numbers in ((other, {0, 2, 4, 10}), (core.asker, {1, 3, 5})):
        while not numbers <= found:
            result = core.answer(frontend, UtilityResult)
            assert isinstance(result.answer, AdapterLoaded)
            found.add(result.id)


def test_more_loads_than_may_wait_are_refused(core, tmp_path):
    core.workers.kept = []
    for i in range(103):
        write_folder(tmp_path / f"b{i}")
        find(core, core.asker, i, f"b{i}", "greedy")
    result = core.answer(core.asker, UtilityResult)
    assert (result.id, result.answer.code) == (102, "overloaded") and isinstance(result.answer, UtilityFailed)


def test_an_adapter_asked_for_once_is_answered_beside_others_that_are_asked_for_without_end(tmp_path):
    """As many others as there are slots, each with requests at all times."""
    core = Core(tmp_path, limits={"max_loras": 2}, max_queue_s=2.0)
    try:
        for i in range(3):
            core.load(f"a{i}", write_folder(tmp_path / f"a{i}"))
        for sent in range(1, 9):
            core.send(sent, f"a{sent % 2}", max_tokens=10 + 3 * sent)
        core.until(lambda: len(core.core.scheduler.slots.holders) == 4)
        core.send(LATE, "a2")
        tokens, began = [], core.core.requests.clock()
        while len(tokens) < 6:
            message = core.answer(core.sender, object)
            for end in getattr(message, "finished", ()):
                if end.key >> 8 != LATE:
                    sent += 1
                    core.send(sent, f"a{sent % 2}", max_tokens=10 + sent % 20)
            if hasattr(message, "keys"):
                keys, ids = np.frombuffer(message.keys, np.int64) >> 8, np.frombuffer(message.tokens, np.int32)
                tokens += ids[keys == LATE].tolist()
            assert getattr(message, "id", 0) != LATE, message
        assert core.core.requests.clock() - began < 2.0
    finally:
        core.close()

"""Loads of adapters on demand: few of one key at a time, whichever frontends it asks through."""

import numpy as np
import pytest
from adapter_core import Core
from adapter_folders import write_folder
from core_by_hand import EPOCH
from hypothesis import given
from hypothesis import strategies as st

from quire.enginecore.adapters.turns import MOST_LOADS, LoadTurns
from quire.ipc.adapters import HOST_ONLY
from quire.ipc.messages.frontend import RequestError, StepOutputs, Utility, UtilityResult
from quire.ipc.messages.utilities import (
    AdapterLoaded,
    AdaptersRestored,
    FindAdapter,
    LoadFolder,
    RestoreAdapters,
    UnloadAdapter,
    UtilityFailed,
)


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


def test_loads_that_are_over_at_once_are_not_nested():
    turns, under_way, ended = LoadTurns(2000), [], []
    for _ in range(2):
        assert turns.begin("a", under_way.append)
    for number in range(2000):
        assert turns.begin("a", lambda over, number=number: (ended.append(number), over()))
    under_way.pop()()
    assert ended == list(range(2000)) and not turns.num_waiting
    under_way.pop()()
    turns.check()


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


MANY = 2000  # many more than Python's stack has room for


@pytest.fixture
def wide(tmp_path, request):
    """A core in which as many may wait, and a folder that can be loaded: on demand, if the test's parameter says so."""
    write_folder(tmp_path / "sql")
    made = Core(tmp_path, limits={"on_demand": getattr(request, "param", False)}, max_num_waiting=2 * MANY)
    yield made
    made.close()


def waits(core):
    """How many calls wait for the adapter."""
    return len(core.adapters._busy.get("sql", ()))


def some_at_a_time(core, numbers):
    """The same numbers, with turns of the core between them: a socket's queue is bounded."""
    for number in numbers:
        yield number
        for _ in range(60 if number % 200 == 199 else 0):
            core.turn()


def found_by_all(core, numbers):
    left = set(numbers)
    while left:
        result = core.answer(core.asker, UtilityResult)
        assert isinstance(result.answer, AdapterLoaded), result
        left.remove(result.id)


def go_on(core):
    kept, core.workers.kept = core.workers.kept, None
    for request in kept:
        core.workers.control(request)


@pytest.mark.parametrize("wide", [True], indirect=True)
def test_thousands_of_calls_of_one_key_ask_for_an_adapter_on_demand(wide):
    loads = wide.workers.kept = []
    for number in some_at_a_time(wide, range(MANY)):
        find(wide, wide.asker, number, "sql", "key")
    wide.until(lambda: loads and wide.adapters._turns.num_waiting == MANY - 2)
    go_on(wide)
    found_by_all(wide, range(MANY))
    assert wide.workers.loads == [(1, HOST_ONLY)]


def test_thousands_of_calls_wait_for_a_load(wide, tmp_path):
    loads = wide.workers.kept = []
    wide.asker.send(Utility(EPOCH, 0, LoadFolder("sql", str(tmp_path / "sql"))))
    wide.until(lambda: loads)
    for number in some_at_a_time(wide, range(1, MANY)):
        find(wide, wide.asker, number, "sql", "key")
    wide.until(lambda: waits(wide) == MANY - 1)
    go_on(wide)
    found_by_all(wide, range(MANY))


def test_thousands_of_requests_wait_for_an_adapter_that_is_restored(wide, tmp_path):
    info = wide.load("sql", tmp_path / "sql")
    wide.ask(UnloadAdapter("sql"))
    wide.until(lambda: wide.workers.forgotten)
    loads = wide.workers.kept = []
    wide.asker.send(Utility(EPOCH, 1000, RestoreAdapters([info])))
    wide.until(lambda: loads)
    for number in some_at_a_time(wide, range(MANY)):
        wide.send(number, "sql", num_tokens=2, max_tokens=1)
    wide.until(lambda: waits(wide) == MANY)
    go_on(wide)
    assert wide.answer(wide.asker, UtilityResult).answer == AdaptersRestored([])
    left = set(range(MANY))
    while left:
        message = wide.answer(wide.sender, StepOutputs | RequestError)
        assert isinstance(message, StepOutputs), message
        left -= {end.key >> 8 for end in message.finished}

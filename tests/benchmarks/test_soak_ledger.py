"""The ledger of `soak.py --kill`, and what its judge lets pass."""

import os
import random

import pytest
from soak_faults import BOUNDS_MIB, Memory, broken_bounds, grown, parse_faults
from soak_ledger import CAUSES, Fault, Ledger, Observed, Stalls, cause_of
from soak_requests import KINDS, STREAMED, catalogue, of_whole

LOST_CONNECTION = "the connection was lost"
RIGHT = Observed("one two", 2, "length")


def down(code: str) -> str:
    return f'503: {{"error": {{"code": "{code}"}}}}'


def ledger_of(*faults: tuple[float, str]) -> Ledger:
    return Ledger(faults=[Fault(at, kind, "KILL", 1) for at, kind in faults])


def test_every_request_has_one_end_and_what_has_none_is_lost() -> None:
    ledger = ledger_of()
    first, second, third = (ledger.send("stream", float(n)) for n in range(3))
    ledger.answer(first, 3.0, RIGHT, RIGHT)
    ledger.answer(second, 3.0, RIGHT, RIGHT)
    ledger.answer(second, 4.0, RIGHT, RIGHT)
    assert ledger.ends()["open"] == 1
    ledger.close(9.0)
    assert [entry.end for entry in (first, second, third)] == ["right", "doubled", "lost"]
    assert sum(ledger.ends().values()) == 3 and len(ledger.shown) == 2


@pytest.mark.parametrize(
    "seen", [Observed("one twx", 2, "length"), Observed("one two", 3, "length"), Observed("one two", 2, "stop")]
)
def test_another_text_length_or_finish_reason_is_wrong(seen: Observed) -> None:
    ledger = ledger_of((0.5, "worker"))
    entry = ledger.send("stream", 0.0)
    ledger.answer(entry, 1.0, RIGHT, seen)
    assert entry.end == "wrong" and entry.note


def test_only_lengths_count_where_texts_may_differ() -> None:
    ledger = Ledger(by_text=False)
    entry = ledger.send("stream", 0.0)
    ledger.answer(entry, 1.0, RIGHT, RIGHT._replace(text="three four"))
    assert entry.end == "right"


@pytest.mark.parametrize(
    ("error", "faults", "end"),
    [
        (LOST_CONNECTION, [(5.0, "frontend")], "error"),
        (LOST_CONNECTION, [(5.0, "worker")], "wrong"),
        (LOST_CONNECTION, [(11.0, "frontend")], "wrong"),  # after the error
        (down("engine_down"), [(5.0, "core")], "error"),
        (down("engine_down"), [(5.0, "frontend")], "wrong"),
        (down("engine_error"), [(5.0, "worker"), (6.0, "core")], "error"),
        (down("engine_error"), [(5.0, "worker")], "wrong"),
        (down("engine_error"), [(1.0, "worker"), (6.0, "worker")], "wrong"),  # one of them came before the request
        (down("invalid_value"), [(5.0, "trial"), (5.0, "core"), (5.0, "frontend")], "wrong"),
        (down("internal_error"), [(5.0, "trial"), (5.0, "core"), (5.0, "frontend")], "wrong"),
    ],
)
def test_an_error_counts_only_with_a_fault_that_explains_it(error: str, faults: list[tuple[float, str]], end: str) -> None:
    ledger = ledger_of(*faults)
    entry = ledger.send("stream", 4.0)
    ledger.error(entry, 10.0, 503, error)
    assert entry.end == end
    assert (sum(ledger.errors().values()) == 1) is (end == "error")


def test_every_cause_can_be_told_and_an_old_fault_explains_nothing() -> None:
    texts = {
        "connection lost": LOST_CONNECTION,
        "cannot connect": "cannot connect: [Errno 111]",
        "response stopped": "The server that ran this response was stopped.",
    }
    for cause, rule in CAUSES.items():
        assert cause_of(0, texts.get(cause, f'{{"code": "{cause}"}}')) == cause
        ledger = ledger_of(*[(1.0, kind) for kind in rule.kinds] * 2)
        entry = ledger.send("stream", 2.0 + rule.within_s)
        ledger.error(entry, 3.0 + rule.within_s, 0, texts.get(cause, f'{{"code": "{cause}"}}'))
        assert entry.end == "wrong"


def test_a_stall_belongs_to_the_first_fault_in_it_else_to_the_last_before_it() -> None:
    stalls = Stalls()
    for client, times in enumerate([(0.0, 1.0, 4.0, 4.05), (0.0, 1.5, 2.5), (0.0, 0.05)]):
        for at in times:
            stalls.progress(client, at)
    found = stalls.by_fault([Fault(0.5, "core", "STOP", 1), Fault(2.0, "worker", "KILL", 2), Fault(9.0, "spare", "KILL", 3)])
    assert found["core:STOP"] == {"count": 2, "median": 1.0, "p99": 1.0, "worst": 1.0}
    assert found["worker:KILL"] == {"count": 2, "median": 2.0, "p99": 2.0, "worst": 2.0}
    assert found["spare:KILL"]["count"] == 0 and stalls.worst_s() == 3.0


def test_faults_are_parsed_and_others_refused_by_name() -> None:
    assert parse_faults("worker:kill, core") == [("worker", "KILL"), ("core", "KILL"), ("core", "STOP")]
    for text in ("engine", "worker:TERM", ""):
        with pytest.raises(ValueError, match="KIND:SIGNAL is needed"):
            parse_faults(text)


def test_a_process_that_grows_breaks_its_bound_and_shared_pages_do_not_count() -> None:
    assert grown([10.0] * 50 + [14.0] * 50) == 4.0 and grown([10.0] * 99 + [50.0]) == 0.0
    grows = {"rss": BOUNDS_MIB["core"] + 1, "pss": BOUNDS_MIB["core"] + 2, "lived_s": 300.0}
    assert len(broken_bounds({"core 1": grows, "worker 2": grows}, 40.0)) == 2  # the core, and the GPU
    assert not broken_bounds({"core 1": {**grows, "rss": 0.0}}, 1.0)


def test_a_catalogue_depends_on_its_seed_and_a_comment_is_new_each_time() -> None:
    found = catalogue("m", 1024, 80, 2, seed=1, templates=True)
    assert found == catalogue("m", 1024, 80, 2, seed=1, templates=True) != catalogue("m", 1024, 80, 2, seed=2, templates=True)
    assert [sum(request.kind == kind for request in found) for kind in KINDS] == [2] * len(KINDS)
    assert all(request.body.get("stream", False) is (request.kind in STREAMED) for request in found)
    for request in random.Random(1).sample(found, len(found)):
        assert (request.again(1) != request.again(2)) is (request.kind in ("grammar", "template"))
    assert "template" not in {request.kind for request in catalogue("m", 1024, 80, 2, seed=1, templates=False)}


def test_whole_answers_of_each_route_are_read_alike() -> None:
    choices = [{"index": 1, "text": "b", "finish_reason": "stop"}, {"index": 0, "text": "a", "finish_reason": "length"}]
    assert of_whole({"choices": choices, "usage": {"completion_tokens": 3}}) == Observed("a\0b", 3, "length stop")
    output = [{"type": "message", "content": [{"text": "a"}, {"text": "b"}]}]
    response = {"object": "response", "status": "completed", "output": output, "usage": {"output_tokens": 2}}
    assert of_whole(response) == Observed("ab", 2, "completed")


class Family:
    """A server of this process, and later of its parent, too."""

    def __init__(self) -> None:
        self.root, self.cores = os.getpid(), list[int]()

    def by_kind(self) -> dict[str, list[int]]:
        return {"core": self.cores}


def test_only_processes_that_were_there_at_the_beginning_are_judged() -> None:
    family = Family()
    memory = Memory(family)  # type: ignore[arg-type]
    for second in range(30):
        if second == 5:
            family.cores.append(os.getppid())
        memory.sample(float(second))
    assert memory.growth(1.0, set()).keys() == {f"launcher {os.getpid()}"}
    assert memory.growth(1.0, {os.getpid()}) == {}

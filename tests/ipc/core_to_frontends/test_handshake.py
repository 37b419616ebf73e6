"""CoreToFrontends against frontends made by hand: welcome, files, refusals, how much a turn takes."""

import logging
import time

import pytest
from core_to_frontends_cases import EPOCH, add, answer, outputs
from ipc_cores import FILES, make_heartbeat, make_welcome

from quire.ipc.links import core_to_frontends
from quire.ipc.links.core_to_frontends import name_of
from quire.ipc.links.limited_log import LINES
from quire.ipc.links.welcome import new_epoch
from quire.ipc.messages.frontend import (
    PROTOCOL_VERSION,
    Abort,
    AddRequest,
    File,
    Finish,
    Generate,
    GetFile,
    Heartbeat,
    Hello,
    Ping,
    Refused,
    TokenInputs,
    Welcome,
)
from quire.ipc.sampling import SamplingParams


def test_hello_is_answered_with_a_welcome_and_files_on_demand(core, make_frontend):
    frontend = make_frontend(hello=False)
    frontend.send(Hello(PROTOCOL_VERSION))
    assert answer(core, frontend) == make_welcome(EPOCH)
    for name, data in FILES.items():
        frontend.send(GetFile(EPOCH, name))
        got = answer(core, frontend)
        assert isinstance(got, File) and (got.name, got.data) == (name, data)
        assert got.digest == next(f.digest for f in make_welcome(EPOCH).files if f.name == name)
    assert core.link.frontends == [frontend.identity]
    assert core.requests == []


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "", "config.json"])
def test_only_listed_files_are_given(core, make_frontend, name):
    frontend = make_frontend()
    frontend.send(GetFile(EPOCH, name))
    assert isinstance(answer(core, frontend), Refused)


def test_frontend_that_comes_early_waits_for_its_welcome(make_core, make_frontend):
    core = make_core()
    core.link._welcome = None
    frontend = make_frontend(hello=False, at=core)
    frontend.send(Hello(PROTOCOL_VERSION))
    frontend.send(Ping(0))
    core.until(lambda: core.link._frontends)
    assert core.link.frontends == []
    core.link.broadcast(make_heartbeat(EPOCH))
    assert isinstance(answer(core, frontend), Heartbeat)  # so that it knows that somebody is there
    core.link.set_welcome(make_welcome(EPOCH), FILES)
    assert isinstance(answer(core, frontend), Welcome)
    assert core.link.frontends == [frontend.identity]


def test_other_protocol_is_refused_with_both_numbers(core, make_frontend):
    frontend = make_frontend(hello=False)
    frontend.send(Hello(PROTOCOL_VERSION + 8))
    refused = answer(core, frontend)
    assert isinstance(refused, Refused)
    assert f"protocol {PROTOCOL_VERSION}" in refused.reason and str(PROTOCOL_VERSION + 8) in refused.reason


def test_who_is_refused_has_a_line_in_the_log_and_the_log_has_an_end(core, make_frontend, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    frontend = make_frontend(hello=False)
    frontend.send(Hello(PROTOCOL_VERSION + 8))
    assert isinstance(answer(core, frontend), Refused)
    (line,) = [r for r in caplog.records if "refused" in r.getMessage()]
    assert line.levelname == "WARNING" and line.name == "quire.enginecore"
    said = f"frontend {name_of(frontend.identity)} is refused: the engine speaks protocol {PROTOCOL_VERSION}, this frontend"
    assert line.getMessage().startswith(said)
    caplog.clear()
    for _ in range(100):
        frontend.send(Ping(EPOCH - 1))
        assert isinstance(answer(core, frontend), Refused)
    assert 1 <= len(caplog.records) <= LINES


def test_message_for_an_earlier_core_is_refused(core, make_frontend):
    """As a DEALER that reconnects by itself would deliver its queue to a successor."""
    stranger = make_frontend(hello=False)
    stranger.send(add(1, epoch=EPOCH - 1))
    refused = answer(core, stranger)
    assert isinstance(refused, Refused) and refused.epoch == EPOCH and "stale" in refused.reason
    known = make_frontend()
    for message in (add(1, EPOCH - 1), Abort(EPOCH - 1, [1]), Finish(EPOCH - 1, 256), Ping(EPOCH - 1)):
        known.send(message)
        assert isinstance(answer(core, known), Refused)
    assert core.requests == []
    assert core.lost == [known.identity]


def test_request_without_hello_is_refused_even_with_the_right_epoch(core, make_frontend):
    frontend = make_frontend(hello=False)
    frontend.send(add(1))
    assert isinstance(answer(core, frontend), Refused)
    assert core.requests == []


def test_frontends_are_limited(core, make_frontend, monkeypatch):
    monkeypatch.setattr(core_to_frontends, "MAX_FRONTENDS", 1)
    make_frontend()
    frontend = make_frontend(hello=False)
    frontend.send(Hello(PROTOCOL_VERSION))
    assert isinstance(answer(core, frontend), Refused)


def test_two_frontends_with_the_same_ids_are_kept_apart(core, make_frontend):
    a, b = make_frontend(), make_frontend()
    a.send(add(5, max_tokens=3))
    b.send(add(5, max_tokens=4))
    core.until(lambda: len(core.requests) == 2)
    assert {(i, m.id, m.task.params.max_tokens) for i, m in core.requests} == {(a.identity, 5, 3), (b.identity, 5, 4)}
    core.link.send(a.identity, outputs(1, key=5 << 8))
    core.link.send(b.identity, outputs(2, key=5 << 8))
    core.link.send(a.identity, outputs(3, key=5 << 8))
    got_a, got_b = [answer(core, a), answer(core, a)], answer(core, b)
    assert [(m.seq, m.tokens) for m in got_a] == [(0, b"\1\0\0\0"), (1, b"\3\0\0\0")]
    assert (got_b.seq, got_b.tokens) == (0, b"\2\0\0\0")
    assert not b.ready()


def test_receive_looks_at_no_more_than_its_limit(core, make_frontend):
    frontend = make_frontend()
    for i in range(10):
        frontend.send(add(i))
    got: list = []
    deadline = time.monotonic() + 20
    while len(got) < 10 and time.monotonic() < deadline:
        core._poller.poll(1000)
        new = core.link.receive(3)
        assert len(new) <= 3
        got += new
    assert [m.id for _, m in got] == list(range(10))


def test_receive_ends_when_its_time_is_over(core, make_frontend, monkeypatch):
    monkeypatch.setattr(core_to_frontends, "RECEIVE_S", 0.0)
    frontend = make_frontend()
    for i in range(5):
        frontend.send(add(i))
    got: list = []
    deadline = time.monotonic() + 20
    while len(got) < 5 and time.monotonic() < deadline:
        core._poller.poll(1000)
        new = core.link.receive()
        assert len(new) <= 1
        got += new
    assert [m.id for _, m in got] == list(range(5))


def test_receive_takes_what_is_large_one_by_one(make_core, make_frontend):
    """A turn of the loop must stay short for everybody's streams, whatever one frontend sends."""
    size = core_to_frontends.RECEIVE_BYTES
    core = make_core()
    large, small = make_frontend(at=core), make_frontend(at=core)
    for i in range(6):
        large.send(AddRequest(EPOCH, i, TokenInputs(bytes(size // 2)), Generate(SamplingParams())))
        small.send(add(i))
    got: list = []
    deadline = time.monotonic() + 20
    while len(got) < 12 and time.monotonic() < deadline:
        core._poller.poll(1000)
        new = core.link.receive()
        assert sum(len(m.inputs.token_ids) for _, m in new) <= 1.5 * size
        got += new
    assert [m.id for i, m in got if i == large.identity] == [m.id for i, m in got if i == small.identity] == list(range(6))


def test_a_file_is_sent_once_a_connection_and_few_files_a_turn(make_core, make_frontend):
    core = make_core()
    names = [f"{i}.json" for i in range(4)]
    files = {name: bytes(core_to_frontends.RECEIVE_BYTES) for name in names}
    core.link.set_welcome(make_welcome(EPOCH, files), files)
    frontend = make_frontend(at=core)
    for name in names:
        frontend.send(GetFile(EPOCH, name))
    deadline, sent = time.monotonic() + 20, 0
    while sent < 4 and time.monotonic() < deadline:
        core._poller.poll(1000)
        core.link.receive()
        before, sent = sent, len(core.link._frontends[frontend.identity].files)
        assert sent - before <= 1
    assert [answer(core, frontend).name for _ in names] == names
    frontend.send(GetFile(EPOCH, names[0]))
    assert isinstance(answer(core, frontend), Refused)


def test_send_to_nobody_is_harmless(core):
    assert not core.link.send(b"\1" * 16, outputs(1))
    core.link.broadcast(make_heartbeat(EPOCH))
    assert core.link.lost() == []


def test_epochs_differ():
    epochs = {new_epoch() for _ in range(1000)}
    assert len(epochs) == 1000 and all(0 < e < 2**62 for e in epochs)

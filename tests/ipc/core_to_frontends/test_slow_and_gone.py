"""CoreToFrontends and frontends that are slow, silent or gone."""

import numpy as np
from core_to_frontends_cases import EPOCH, answer, decode, outputs
from deadlines import DEADLINE_S
from ipc_cores import make_heartbeat

from quire.ipc.messages.frontend import Finished, Ping, Refused, RequestError, Started, StepOutputs, TokenLogprobs


class SlowFrontend:
    """A core with a low high-water mark, and a frontend that does not read. `key` names its one sequence."""

    def __init__(self, make_core, make_frontend, **options) -> None:
        self.core = make_core(send_hwm=2, **options)
        self.frontend = make_frontend(at=self.core)

    def fill(self, first: int = 0, big: int = 4096) -> int:
        """Send tokens first, first + 1, ... until the outbox is in use; returns the next token."""
        token = first
        while not self.core.link._slow:
            self.core.link.send(self.frontend.identity, outputs(*[token] * big))
            token += 1
        return token

    def read_all(self) -> list[StepOutputs]:
        got: list[StepOutputs] = []
        while self.core.link._slow or self.frontend.socket.poll(100):
            while self.frontend.ready():
                got.append(decode(self.frontend.socket.recv()))
            self.core.turn(0)
        return got


def test_outputs_of_a_slow_frontend_wait_merged_and_in_order(make_core, make_frontend):
    slow = SlowFrontend(make_core, make_frontend)
    at = slow.fill()
    identity, core_link = slow.frontend.identity, slow.core.link
    logprobs = [TokenLogprobs(-1.0, 1, b"", b"")]
    for token in range(at, at + 50):
        core_link.send(identity, outputs(token, started=[Started(token, 0, 0.1)], logprobs=logprobs, drafts=bytes([token])))
    core_link.send(identity, RequestError(EPOCH, 9, "engine_error", "between"))
    core_link.send(identity, outputs(at + 50, finished=[Finished(0, "stop", 3)]))
    assert len(core_link._slow[identity].outbox) == 3  # 51 steps, an error, one step
    core_link.check()
    got = slow.read_all()
    steps = [m for m in got if isinstance(m, StepOutputs)]
    tokens = [t for m in steps for t in dict.fromkeys(np.frombuffer(m.tokens, np.int32).tolist())]
    assert tokens == list(range(at + 51))
    assert [m.seq for m in steps] == list(range(len(steps)))
    assert isinstance(got[-2], RequestError) and got[-1].finished == [Finished(0, "stop", 3)]
    assert [s.key for s in steps[-2].started] == list(range(at, at + 50))
    assert len(steps[-2].logprobs) == 50 and list(steps[-2].drafts) == list(range(at, at + 50))
    assert len(steps[-2].keys) == 8 * len(steps[-2].tokens) // 4
    assert slow.core.lost == []


def test_frontend_that_never_reads_is_lost_at_its_bound(make_core, make_frontend):
    slow = SlowFrontend(make_core, make_frontend, outbox_bytes=1 << 20)
    other = make_frontend(at=slow.core)
    token = slow.fill()
    while slow.core.link.send(slow.frontend.identity, outputs(*[token] * 4096)):
        slow.core.link.check()
        token += 1
    slow.core.turn(0)
    assert slow.core.lost == [slow.frontend.identity]
    assert not slow.core.link.send(slow.frontend.identity, outputs(1))
    assert slow.core.link.send(other.identity, outputs(1))
    assert isinstance(answer(slow.core, other), StepOutputs)


def test_of_many_slow_frontends_the_slowest_is_lost(make_core, make_frontend):
    """Each stays below its own bound; together they would hold what a thousand of them may."""
    core = make_core(send_hwm=2, outbox_bytes=1 << 20)
    frontends = [make_frontend(at=core) for _ in range(12)]
    first, *others = [frontend.identity for frontend in frontends]
    for identity in (*others, first):
        while identity not in core.link._slow or (identity == first and core.link._slow[first].outbox.num_bytes < 900 << 10):
            assert core.link.send(identity, outputs(*[1] * 4096))
    for identity in others:
        while first in core.link._frontends and core.link._frontends[identity].outbox.num_bytes < 800 << 10:
            assert core.link.send(identity, outputs(*[1] * 4096))
            core.link.check()
    assert core.link.lost() == [first]
    assert core.link._waiting.num_bytes <= 8 << 20
    assert not core.link.send(first, outputs(1)) and core.link.send(others[0], outputs(1))
    core.link.check()


def test_heartbeats_do_not_wait_for_a_slow_frontend(make_core, make_frontend):
    slow = SlowFrontend(make_core, make_frontend)
    slow.fill()
    held = slow.core.link._slow[slow.frontend.identity].outbox.num_bytes
    for _ in range(1000):
        slow.core.link.broadcast(make_heartbeat(EPOCH))
    assert slow.core.link._slow[slow.frontend.identity].outbox.num_bytes == held


def test_gone_frontend_is_lost_at_the_next_send(core, make_frontend):
    frontend, other = make_frontend(), make_frontend()
    frontend.socket.close()
    core.until(lambda: not core.link.send(frontend.identity, outputs(1)), timeout_s=DEADLINE_S)
    core.turn(0)
    assert core.lost == [frontend.identity]
    assert core.link.frontends == [other.identity]


def test_gone_frontend_without_outputs_is_lost_at_the_next_heartbeat(core, make_frontend):
    frontend = make_frontend()
    frontend.socket.close()
    core.heartbeats = True
    core.until(lambda: core.lost, timeout_s=DEADLINE_S)
    assert core.lost == [frontend.identity]


def test_gone_frontend_is_lost_while_its_outbox_waits(make_core, make_frontend):
    slow = SlowFrontend(make_core, make_frontend)
    slow.fill()
    slow.frontend.socket.close()
    slow.core.until(lambda: slow.core.lost, timeout_s=DEADLINE_S)


def test_silent_frontend_is_lost_and_one_that_pings_is_not(make_core, make_frontend):
    core = make_core(frontend_timeout_s=0.2)
    core.link._next_timeout_check = 0.0
    silent, alive = make_frontend(at=core), make_frontend(at=core)

    def ping() -> bool:
        alive.send(Ping(EPOCH))
        return bool(core.lost)

    core.until(ping)
    assert core.lost == [silent.identity] and core.link.frontends == [alive.identity]
    assert isinstance(answer(core, silent), Refused)


def test_core_that_stood_still_blames_nobody(make_core, make_frontend):
    core = make_core(frontend_timeout_s=3.0)
    frontend = make_frontend(at=core)
    core.link._clock._last_tick -= 60.0  # the process was stopped for a minute
    core.turn(0)
    assert core.lost == []
    frontend.send(Ping(EPOCH))
    core.turn(1000)
    assert 1.0 <= core.link._frontends[frontend.identity].heard_at < 3.0

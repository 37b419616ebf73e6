"""CoreChannel against real endpoints: greeting, files, loss and return, a core replaced, frontends stopped and killed."""

import asyncio
import os
import queue
import signal
import time
from collections.abc import Awaitable, Callable

import numpy as np
import psutil
import pytest
import uvloop
import zmq
from ipc_children import Role
from ipc_cores import FILES, CoreThread, LoopingCore, make_beat, make_welcome

from quire.ipc import frontend_channel
from quire.ipc.core_endpoint import CoreEndpoint
from quire.ipc.frontend_channel import ChannelBusy, ChannelDown, CoreChannel
from quire.ipc.messages import (
    MAX_FRONTEND_MESSAGE,
    MAX_TOGETHER,
    Abort,
    AddRequest,
    Beat,
    CoreMessage,
    Finished,
    FrontendMessage,
    Ping,
    ShuttingDown,
    StepOutputs,
    Welcome,
)
from quire.ipc.process import spawn
from quire.ipc.sampling import SamplingParams
from quire.ipc.sockets import writable


class Listener:
    """What a channel's callbacks have heard, and waiting for more of it."""

    def __init__(self) -> None:
        self.messages: list[CoreMessage] = []
        self.log: list[str | int] = []  # epochs of connections, reasons of losses
        self.changed = asyncio.Event()

    def options(self) -> dict[str, Callable]:
        return {"on_message": self.on_message, "on_lost": self.on_lost, "on_connected": self.on_connected}

    def on_message(self, message: CoreMessage) -> None:
        if not isinstance(message, Beat):
            self.messages.append(message)
        self.changed.set()

    def on_lost(self, reason: str) -> None:
        self.log.append(reason)
        self.changed.set()

    def on_connected(self, welcome: Welcome) -> None:
        self.log.append(welcome.epoch)
        self.changed.set()

    async def until(self, condition: Callable[[], object], timeout_s: float = 20.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await self.changed.wait()
                self.changed.clear()

    def tokens(self) -> list[int]:
        return [t for m in self.messages for t in np.frombuffer(m.tokens, np.int32).tolist()]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request):
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        yield runner.run


@pytest.fixture
def make_core():
    """Cores that run in threads; the options are CoreThread's."""
    cores: list[CoreThread] = []

    def make(answer: Callable | None = None, **options) -> CoreThread:
        cores.append(CoreThread(answer or echo, **options))
        return cores[-1]

    yield make
    for core in cores:
        core.stop()


def outputs(epoch: int, key: int, *tokens: int, finished: bool = False) -> StepOutputs:
    keys, data = np.full(len(tokens), key, np.int64).tobytes(), np.asarray(tokens, np.int32).tobytes()
    return StepOutputs(epoch, 0, keys, data, [Finished(key, "stop")] if finished else [])


def echo(core: LoopingCore, identity: bytes, message: FrontendMessage) -> None:
    """One token for each request: its id."""
    if isinstance(message, AddRequest):
        core.endpoint.send(identity, outputs(core.epoch, message.id << 8, message.id, finished=True))


def add(channel: CoreChannel, request_id: int) -> AddRequest:
    return AddRequest(channel.epoch, request_id, b"\1\0\0\0", SamplingParams())


# ------------------------------------------------------------------------------------------------- ordinary life
def test_connects_with_welcome_and_files_and_exchanges_messages(run, make_core):
    core = make_core(epoch=4)

    async def main() -> None:
        heard = Listener()
        channel = await CoreChannel.connect(core.address, **heard.options())
        assert (channel.connected, channel.epoch, channel.files) == (True, 4, FILES)
        assert channel.welcome == make_welcome(4) and heard.log == [4]
        for i in range(100):
            channel.send(add(channel, i))
        await heard.until(lambda: len(heard.tokens()) == 100)
        assert heard.tokens() == list(range(100))
        assert [m.seq for m in heard.messages] == list(range(len(heard.messages)))
        await channel.close()
        await channel.close()
        assert heard.log == [4]  # closing is no loss
        with pytest.raises(ChannelDown):
            channel.send(Abort(4, [1]))

    run(main())


def test_message_beyond_the_cores_limit_is_refused_here(run, make_core):
    core = make_core()

    async def main() -> None:
        channel = await CoreChannel.connect(core.address, **Listener().options())
        with pytest.raises(ValueError, match="longer"):
            channel.send(AddRequest(channel.epoch, 1, bytes(MAX_FRONTEND_MESSAGE), SamplingParams()))
        assert channel.connected
        await channel.close()

    run(main())


def test_send_says_busy_rather_than_wait(run):
    core = LoopingCore()

    async def main() -> None:
        connecting = asyncio.create_task(CoreChannel.connect(core.endpoint.address, **Listener().options()))
        while not connecting.done():
            core.turn(5)
            await asyncio.sleep(0)
        channel = await connecting
        with pytest.raises(ChannelBusy):
            for i in range(1_000_000):  # the core reads nothing
                channel.send(Abort(channel.epoch, [i]))
        await channel.close()

    run(main())
    core.endpoint.close(linger_s=0)


def test_a_failing_callback_does_not_stop_the_messages_after_it(run, make_core):
    core = make_core()

    async def main() -> None:
        heard, problems = Listener(), []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context["exception"]))

        def on_message(message: CoreMessage) -> None:
            heard.on_message(message)
            if isinstance(message, StepOutputs) and heard.tokens() == [0]:
                raise LookupError("as a bug would")

        channel = await CoreChannel.connect(core.address, on_message=on_message)
        for i in range(20):
            channel.send(add(channel, i))
        await heard.until(lambda: len(heard.tokens()) == 20)
        assert [type(p) for p in problems] == [LookupError]
        await channel.close()

    run(main())


def test_frontend_that_is_busy_for_long_keeps_its_connection_and_its_tokens(run, make_core):
    """Its event loop stands still for longer than the silence it allows the core."""

    def answer(core: LoopingCore, identity: bytes, message: FrontendMessage) -> None:
        for i in range(50):
            core.endpoint.send(identity, outputs(core.epoch, 0, i))

    core = make_core(answer, frontend_timeout_s=30.0)

    async def main() -> None:
        heard = Listener()
        channel = await CoreChannel.connect(core.address, **heard.options(), silence_s=0.5)
        channel.send(add(channel, 1))
        until = time.monotonic() + 1.2
        while time.monotonic() < until:  # no await
            pass
        await heard.until(lambda: len(heard.tokens()) == 50)
        assert heard.tokens() == list(range(50)) and len(heard.log) == 1
        await channel.close()

    run(main())


def taken(core: CoreThread, monkeypatch: pytest.MonkeyPatch) -> tuple[list[list[int]], Callable[[int], Awaitable[None]]]:
    """What the core takes up, message for message of ZeroMQ's: the requests' ids, or those of Aborts, negative; and the wait
    until one of them is there."""
    found: list[list[int]] = []
    news: queue.SimpleQueue[int] = queue.SimpleQueue()

    def answer(core: LoopingCore, identity: bytes, message: FrontendMessage) -> None:
        found[-1].append(message.id if isinstance(message, AddRequest) else -message.ids[0])
        news.put(found[-1][-1])

    async def until_taken(wanted: int) -> None:
        while await asyncio.to_thread(news.get, timeout=20.0) != wanted:
            pass

    receive = core.core.endpoint.receive

    def receive_one(limit: int = 1) -> list:
        found.append([])
        return receive(1)

    core._answer = answer
    monkeypatch.setattr(core.core.endpoint, "receive", receive_one)
    return found, until_taken


def test_what_is_held_in_a_turn_goes_together_in_order(run, make_core, monkeypatch):
    core = make_core()
    found, until_taken = taken(core, monkeypatch)

    async def main() -> None:
        channel = await CoreChannel.connect(core.address, **Listener().options())

        async def submit(request_id: int) -> None:
            channel.send(add(channel, request_id))

        channel.hold()
        channel.hold()  # once is enough
        async with asyncio.TaskGroup() as group:
            for i in range(600):
                group.create_task(submit(i))
        channel.send(Abort(channel.epoch, [7]))
        await until_taken(-7)  # sent after the turn, it went by itself
        channel.hold()
        for i in (1, 2, 3):
            channel.send(AddRequest(channel.epoch, i, b"\1\0\0\0" * 130_000, SamplingParams()))
        await until_taken(3)
        channel.hold()
        channel.send(add(channel, 9))
        await channel.close()
        channel.hold()
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # what was held is released into a closed connection

    run(asyncio.wait_for(main(), 30))
    ids = list(range(600))
    assert [f for f in found if f][:6] == [ids[:256], ids[256:512], ids[512:], [-7], [1, 2], [3]]


def test_holding_says_busy_rather_than_wait(run, monkeypatch):
    monkeypatch.setattr(frontend_channel, "_SEND_HWM", 4)
    core = LoopingCore()

    async def main() -> None:
        connecting = asyncio.create_task(CoreChannel.connect(core.endpoint.address, **Listener().options(), silence_s=60.0))
        while not connecting.done():
            core.turn(5)
            await asyncio.sleep(0)
        channel, sent = await connecting, 0
        with pytest.raises(ChannelBusy):
            while sent < 1_000_000:  # the core reads nothing
                channel.hold()
                for _ in range(MAX_TOGETHER):
                    channel.send(Abort(channel.epoch, [sent]))
                    sent += 1
                await asyncio.sleep(0)
                await asyncio.sleep(0)
        assert channel.connected and sent % MAX_TOGETHER == 0
        while len(core.requests) < sent:
            core.turn(100)
        assert [message.ids for _, message in core.requests] == [[i] for i in range(sent)]
        await channel.close()

    run(asyncio.wait_for(main(), 60))
    core.endpoint.close(linger_s=0)


def test_a_core_that_goes_while_much_is_held_is_down_not_an_error_of_ours(run):
    core = LoopingCore()

    async def main() -> None:
        connecting = asyncio.create_task(CoreChannel.connect(core.endpoint.address, **(heard := Listener()).options()))
        while not connecting.done():
            core.turn(5)
            await asyncio.sleep(0)
        channel = await connecting
        channel.hold()
        channel.send(add(channel, 0))
        core.endpoint.close(linger_s=0)
        assert channel._connection._monitor.poll(20_000)  # it is known, but not to the loop, which has no turn
        while writable(channel._connection._socket):
            os.sched_yield()
        for i in range(1, MAX_TOGETHER):
            channel.send(add(channel, i))
        with pytest.raises(ChannelDown):
            channel.send(add(channel, MAX_TOGETHER))
        assert not channel.connected and "has gone" in heard.log[1]
        await channel.close()

    run(asyncio.wait_for(main(), 30))


class Looks:
    """How often the channel has looked whether a message is there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self._wanted, self._enough = 0, asyncio.Event()
        look = frontend_channel.readable

        def counted(socket: zmq.Socket) -> bool:
            self.count += 1
            if self.count == self._wanted:
                self._enough.set()
            return look(socket)

        monkeypatch.setattr(frontend_channel, "readable", counted)

    async def many(self) -> None:
        """Returns when it has looked a thousand times more, of itself: nobody else turns the loop meanwhile."""
        self._wanted, self._enough = self.count + 1000, asyncio.Event()
        await self._enough.wait()

    async def few(self) -> None:
        """Returns when it looks only where something comes."""
        before = -1000
        while self.count - before > 50:
            before = self.count
            for _ in range(200):  # turns of the loop, in each of which it would look once
                await asyncio.sleep(0)


def test_watching_looks_all_the_time_until_outputs_come_or_its_time_is_over(run, make_core, monkeypatch):
    core, looks = make_core(), Looks(monkeypatch)

    async def main() -> None:
        heard = Listener()
        channel = await CoreChannel.connect(core.address, **heard.options())
        for number in (1, 2):
            channel.watch(60.0)
            channel.watch(60.0)  # again: nothing more
            await looks.many()
            channel.send(add(channel, number))
            await looks.few()
            assert heard.tokens()[-1] == number
        channel.watch(0.05)
        await looks.few()
        channel.hold()
        channel.watch(60.0)  # what is asked for has not left yet
        await looks.few()
        assert heard.tokens() == [1, 2] and len(heard.log) == 1
        channel.watch(60.0)
        await channel.close()
        channel.watch(60.0)  # nothing to look at
        await looks.few()

    run(asyncio.wait_for(main(), 30))


def test_watching_ends_with_its_connection(run, monkeypatch, caplog):
    looks = Looks(monkeypatch)

    def provoke(scripted: ScriptedCore, channel: CoreChannel) -> None:
        channel.watch(1e9)
        scripted.core.endpoint.broadcast(ShuttingDown(9))

    loses(run, provoke, "shutting down")
    run(asyncio.wait_for(looks.few(), 30))
    assert not [r.message for r in caplog.records if r.name == "asyncio"]  # no callback has failed


def test_pings_are_sent(run, make_core, monkeypatch):
    monkeypatch.setattr("quire.ipc.frontend_channel.PING_INTERVAL_S", 0.01)
    monkeypatch.setattr("quire.ipc.frontend_channel._TICK_S", 0.01)
    core = make_core(frontend_timeout_s=0.3)

    async def main() -> None:
        heard = Listener()
        channel = await CoreChannel.connect(core.address, **heard.options())
        waited = asyncio.get_running_loop().time() + 1.0
        await heard.until(lambda: heard.log[1:] or asyncio.get_running_loop().time() > waited)
        assert heard.log == [1]
        await channel.close()

    run(main())


# ------------------------------------------------------------------------------------------------- no core, refusals
def test_no_core_is_told_after_the_time_out(run, tmp_path):
    async def main() -> None:
        with pytest.raises(ChannelDown, match=r"no engine .*: none listens at this address"):
            await CoreChannel.connect(f"ipc://{tmp_path}/none", on_message=print, timeout_s=0.2)

    run(main())


@pytest.mark.parametrize("address", ["", "ipc://relative", "tcp://127.0.0.1", "tcp://nowhere:1:2:3:x", "tcp://a b:1"])
def test_address_that_cannot_be_used_is_an_error_at_once(run, address):
    async def main() -> None:
        with pytest.raises((ValueError, zmq.ZMQError)):
            await CoreChannel.connect(address, on_message=print)

    run(main())


def test_waits_for_a_core_that_starts_later(run, tmp_path, make_core):
    address = f"ipc://{tmp_path}/core"

    async def main() -> None:
        connecting = asyncio.create_task(CoreChannel.connect(address, **Listener().options()))
        await asyncio.sleep(0)
        make_core(address=address, epoch=3)
        channel = await connecting
        assert channel.epoch == 3
        await channel.close()

    run(main())


def test_waits_patiently_for_a_core_that_still_loads(run):
    """No Welcome yet, only Beats: longer than the silence that would make it give up."""
    core = LoopingCore(epoch=6)
    core.endpoint._welcome = None

    async def main() -> None:
        heard = Listener()
        connecting = asyncio.create_task(CoreChannel.connect(core.endpoint.address, **heard.options(), silence_s=0.5))
        while not core.endpoint._frontends:
            core.turn(5)
            await asyncio.sleep(0)
        first = next(iter(core.endpoint._frontends))
        ready_at = time.monotonic() + 1.2
        while not connecting.done():
            core.turn(5)
            await asyncio.sleep(0)
            if time.monotonic() > ready_at:
                core.endpoint.set_welcome(make_welcome(6), FILES)
        assert core.endpoint.frontends == [first]  # the same connection all the while
        await connecting.result().close()

    run(main())
    core.endpoint.close(linger_s=0)


def test_other_protocol_is_an_error_at_once(run, make_core, monkeypatch):
    core = make_core()
    monkeypatch.setattr("quire.ipc.frontend_channel.PROTOCOL_VERSION", 99)

    async def main() -> None:
        with pytest.raises(ChannelDown, match="protocol"):
            await CoreChannel.connect(core.address, on_message=print)

    run(main())


# ------------------------------------------------------------------------------------------------- loss and return
class ScriptedCore:
    """An endpoint turned by the test inside its own event loop, step by step."""

    def __init__(self, address: str | None = None, epoch: int = 1, **options) -> None:
        self.core = LoopingCore(address, epoch, **options)

    async def until(self, condition: Callable[[], object], timeout_s: float = 20.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "it has not happened in time"
            self.core.turn(1)
            await asyncio.sleep(0)


def loses(run, provoke: Callable[[ScriptedCore, CoreChannel], None], reason: str, **options) -> None:
    """A connection on which something happens is lost for the reason given, and made anew."""

    async def main() -> None:
        scripted, heard = ScriptedCore(epoch=9), Listener()
        connecting = asyncio.create_task(CoreChannel.connect(scripted.core.endpoint.address, **heard.options(), **options))
        await scripted.until(connecting.done)
        channel = connecting.result()
        first = scripted.core.endpoint.frontends
        provoke(scripted, channel)
        await heard.until(lambda: len(heard.log) >= 2) if not scripted.core.beats else await scripted.until(
            lambda: len(heard.log) >= 2
        )
        assert reason in heard.log[1]
        scripted.core.beats = True
        await scripted.until(lambda: channel.connected)
        await scripted.until(lambda: len(scripted.core.endpoint.frontends) == 1)
        assert heard.log[2:] == [9] and scripted.core.endpoint.frontends != first  # a new identity
        await channel.close()
        scripted.core.endpoint.close(linger_s=0)

    run(main())


def test_missing_outputs_lose_the_connection(run):
    def provoke(scripted: ScriptedCore, channel: CoreChannel) -> None:
        endpoint = scripted.core.endpoint
        (frontend,) = endpoint._frontends.values()
        endpoint.send(frontend.identity, outputs(9, 0, 1))
        frontend.next_seq += 1  # as if one had been dropped on the way
        endpoint.send(frontend.identity, outputs(9, 0, 3))

    loses(run, provoke, "outputs were lost: expected number 1, got 2")


def test_silent_core_is_lost(run):
    def provoke(scripted: ScriptedCore, channel: CoreChannel) -> None:
        scripted.core.beats = False

    loses(run, provoke, "silent", silence_s=0.5)


def test_refused_message_loses_the_connection(run):
    def provoke(scripted: ScriptedCore, channel: CoreChannel) -> None:
        channel.send(Ping(12345))

    loses(run, provoke, "stale epoch")


def test_core_that_shuts_down_is_lost(run):
    def provoke(scripted: ScriptedCore, channel: CoreChannel) -> None:
        scripted.core.endpoint.broadcast(ShuttingDown(9))

    loses(run, provoke, "shutting down")


def test_malformed_message_from_the_core_loses_the_connection(run):
    def provoke(scripted: ScriptedCore, channel: CoreChannel) -> None:
        (identity,) = scripted.core.endpoint.frontends
        scripted.core.endpoint._transmit(identity, b"\xc1 not a message")

    loses(run, provoke, "malformed")


def test_messages_of_another_epoch_are_dropped(run):
    async def main() -> None:
        scripted, heard = ScriptedCore(epoch=9), Listener()
        connecting = asyncio.create_task(CoreChannel.connect(scripted.core.endpoint.address, **heard.options()))
        await scripted.until(connecting.done)
        endpoint = scripted.core.endpoint
        (identity,) = endpoint.frontends
        endpoint._transmit(identity, endpoint._encoder.encode(outputs(8, 0, 666)))
        endpoint._transmit(identity, endpoint._encoder.encode(ShuttingDown(8)))
        endpoint._transmit(identity, endpoint._encoder.encode(make_beat(8)))
        endpoint.send(identity, outputs(9, 0, 1))
        await scripted.until(lambda: heard.messages)
        assert heard.tokens() == [1] and heard.log == [9]
        await connecting.result().close()
        endpoint.close(linger_s=0)

    run(main())


def test_core_replaced_at_the_same_address_loses_doubles_and_mixes_nothing(run, tmp_path, make_core):
    """A stream of requests while cores come and go: each answer belongs to a request of the same core's life, once."""
    address = f"ipc://{tmp_path}/core"
    held: list[tuple[LoopingCore, bytes, AddRequest]] = []

    def answer_every_second(core: LoopingCore, identity: bytes, message: FrontendMessage) -> None:
        if isinstance(message, AddRequest) and message.id % 2 == 0:
            echo(core, identity, message)
        else:
            held.append((core, identity, message))

    async def main() -> None:
        heard = Listener()
        core = make_core(answer_every_second, address=address, epoch=1)
        channel = await CoreChannel.connect(address, **heard.options())
        next_id, sent = 0, {}
        for epoch in (1, 2, 3):
            await heard.until(lambda epoch=epoch: heard.log and heard.log[-1] == epoch)
            seen = len(heard.messages)
            assert channel.epoch == epoch
            for _ in range(40):
                channel.send(add(channel, next_id))
                sent[next_id] = epoch
                next_id += 1
            await heard.until(lambda seen=seen: len([t for m in heard.messages[seen:] for t in m.tokens]) == 20 * 4)
            with pytest.raises(ChannelDown):
                core.stop()
                for _ in range(100_000):  # into the dying connection: none may reach the successor
                    channel.send(add(channel, 10**6 + next_id))
                    await asyncio.sleep(0)
            if epoch < 3:
                core = make_core(answer_every_second, address=address, epoch=epoch + 1)
        got = [(m.epoch, t) for m in heard.messages for t in np.frombuffer(m.tokens, np.int32).tolist()]
        assert sorted(got) == sorted((epoch, i) for i, epoch in sent.items() if i % 2 == 0)
        assert all(message.epoch == core.epoch for core, _, message in held)
        assert {m.id for _, _, m in held if m.id < 10**6} == {i for i in sent if i % 2}
        assert not [m for c, _, m in held if m.id >= 10**6 and c.epoch != m.epoch]
        await channel.close()

    run(main())


def test_files_already_held_are_not_sent_again(run, tmp_path, make_core):
    address = f"ipc://{tmp_path}/core"

    async def main() -> None:
        heard = Listener()
        core = make_core(address=address, epoch=1)
        channel = await CoreChannel.connect(address, **heard.options())
        core.stop()
        await heard.until(lambda: len(heard.log) == 2)
        second = make_core(address=address, epoch=2)
        second.core.endpoint._files = {}  # it would refuse to give one
        await heard.until(lambda: len(heard.log) == 3)
        assert heard.log[2] == 2 and channel.files == FILES
        await channel.close()

    run(main())


def test_file_that_is_not_what_was_announced_is_never_served(run, make_core):
    core = make_core()
    core.core.endpoint._files = dict.fromkeys(FILES, b"something else")

    async def main() -> None:
        with pytest.raises(ChannelDown, match="not the one it announced"):
            await CoreChannel.connect(core.address, on_message=print, timeout_s=0.5)

    run(main())


# ------------------------------------------------------------------------------------------------- whole processes
@pytest.fixture
def make_frontend(reports):
    children = []

    def make(core: LoopingCore, **more):
        role = Role(name="frontend", report_fd=reports.fd, address=core.endpoint.address, **more)
        children.append(spawn("ipc_children", role, [reports.fd]))
        return children[-1]

    yield make
    for child in children:
        child.terminate(0.0)


@pytest.fixture
def core():
    core = LoopingCore(epoch=2**61 + 3, send_hwm=2)
    yield core
    core.endpoint.close(linger_s=0)


def wait_until_stopped(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        pass


def test_stopped_frontend_gets_everything_in_order_when_it_goes_on(core, make_frontend, reports):
    child = make_frontend(core)
    core.until(lambda: core.requests)
    reports.next()
    wait_until_stopped(child.pid)
    identity = core.requests[0][0]
    sent, waiting = 0, 0
    while waiting < 100 * 500 * 12:  # kernel and socket hold some; then the outbox fills
        core.endpoint.send(identity, outputs(core.epoch, 0, *range(sent, sent + 500)))
        sent += 500
        core.turn(0)
        waiting = core.endpoint._slow[identity].outbox.num_bytes if core.endpoint._slow else 0
    num_steps = sent // 500
    core.endpoint.send(identity, outputs(core.epoch, 0, sent, finished=True))
    core.turn(0)
    assert core.lost == [] and core.endpoint._slow
    os.kill(child.pid, signal.SIGCONT)
    core.until(lambda: not core.endpoint._slow)
    core.until(lambda: child.poll() is not None)
    said = reports.next()
    assert (said["counts"], said["ordered"]) == ([sent + 1], True)
    assert said["num_messages"] <= num_steps - 90  # the waiting steps came as one


def test_killed_frontend_is_lost_within_a_second(core, make_frontend, reports):
    children = [make_frontend(core), make_frontend(core)]
    core.until(lambda: len(core.requests) == 2)
    reports.next(), reports.next()
    killed = time.monotonic()
    children[0].proc.kill()
    core.until(lambda: core.lost, timeout_s=2.0)
    assert time.monotonic() - killed < 1.0
    assert len(core.lost) == 1 == len(core.endpoint.frontends)


def test_stopped_and_killed_frontend_is_lost_too(core, make_frontend, reports):
    child = make_frontend(core)
    core.until(lambda: core.requests)
    wait_until_stopped(child.pid)
    while not core.endpoint._slow:
        core.endpoint.send(core.requests[0][0], outputs(core.epoch, 0, *range(500)))
    child.proc.kill()
    core.until(lambda: core.lost, timeout_s=2.0)


def test_address_in_use_by_a_live_core_is_refused_and_that_of_a_dead_one_taken(tmp_path, make_core):
    address = f"ipc://{tmp_path}/core"
    core = make_core(address=address)
    with pytest.raises(FileExistsError, match="another process listens"):
        CoreEndpoint(address, epoch=2)
    assert (tmp_path / "core").stat().st_mode & 0o777 == 0o600
    core.stop()
    assert not (tmp_path / "core").exists()

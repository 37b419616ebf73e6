"""FrontendToCore within a turn of the event loop: what is held back and travels together, and looking without sleep."""

import asyncio
import os
import queue
from collections.abc import Awaitable, Callable

import pytest
import zmq
from deadlines import DEADLINE_S
from frontend_to_core_cases import Listener, ScriptedCore, add, loses
from ipc_cores import CoreThread, LoopingCore

from quire.ipc.links import dealer
from quire.ipc.links import frontend_to_core as frontend_link
from quire.ipc.links.frontend_to_core import FrontendToCore, LinkBusy, LinkDown
from quire.ipc.links.sockets import writable
from quire.ipc.messages.frontend import MAX_TOGETHER, Abort, AddRequest, FrontendMessage, Generate, ShuttingDown, TokenInputs
from quire.ipc.sampling import SamplingParams


def taken(core: CoreThread, monkeypatch: pytest.MonkeyPatch) -> tuple[list[list[int]], Callable[[int], Awaitable[None]]]:
    """What the core takes up, message for message of ZeroMQ's: the requests' ids, or those of Aborts, negative; and the wait
    until one of them is there."""
    found: list[list[int]] = []
    news: queue.SimpleQueue[int] = queue.SimpleQueue()

    def answer(core: LoopingCore, identity: bytes, message: FrontendMessage) -> None:
        found[-1].append(message.id if isinstance(message, AddRequest) else -message.ids[0])
        news.put(found[-1][-1])

    async def until_taken(wanted: int) -> None:
        while await asyncio.to_thread(news.get, timeout=DEADLINE_S) != wanted:
            pass

    receive = core.core.link.receive

    def receive_one(limit: int = 1) -> list:
        found.append([])
        return receive(1)

    core._answer = answer
    monkeypatch.setattr(core.core.link, "receive", receive_one)
    return found, until_taken


def test_what_is_held_in_a_turn_goes_together_in_order(run, make_core, monkeypatch):
    core = make_core()
    found, until_taken = taken(core, monkeypatch)

    async def main() -> None:
        link = await FrontendToCore.connect(core.address, **Listener().options())

        async def submit(request_id: int) -> None:
            link.send(add(link, request_id))

        link.hold()
        link.hold()  # once is enough
        async with asyncio.TaskGroup() as group:
            for i in range(600):
                group.create_task(submit(i))
        link.send(Abort(link.epoch, [7]))
        await until_taken(-7)  # sent after the turn, it went by itself
        link.hold()
        for i in (1, 2, 3):
            link.send(AddRequest(link.epoch, i, TokenInputs(b"\1\0\0\0" * 130_000), Generate(SamplingParams())))
        await until_taken(3)
        link.hold()
        link.send(add(link, 9))
        await link.close()
        link.hold()
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # what was held is released into a closed connection

    run(asyncio.wait_for(main(), 100))
    ids = list(range(600))
    assert [f for f in found if f][:6] == [ids[:256], ids[256:512], ids[512:], [-7], [1, 2], [3]]


def test_holding_says_busy_rather_than_wait(run, monkeypatch):
    monkeypatch.setattr(dealer, "SEND_HWM", 4)
    core = LoopingCore()

    async def main() -> None:
        connecting = asyncio.create_task(FrontendToCore.connect(core.link.address, **Listener().options(), silence_s=60.0))
        while not connecting.done():
            core.turn(5)
            await asyncio.sleep(0)
        link, sent = await connecting, 0
        with pytest.raises(LinkBusy):
            while sent < 1_000_000:  # the core reads nothing
                link.hold()
                for _ in range(MAX_TOGETHER):
                    link.send(Abort(link.epoch, [sent]))
                    sent += 1
                await asyncio.sleep(0)
                await asyncio.sleep(0)
        assert link.connected and sent % MAX_TOGETHER == 0
        while len(core.requests) < sent:
            core.turn(100)
        assert [message.ids for _, message in core.requests] == [[i] for i in range(sent)]
        await link.close()

    run(asyncio.wait_for(main(), 100))
    core.link.close(linger_s=0)


def test_a_core_that_goes_while_much_is_held_is_down_not_an_error_of_ours(run):
    core = LoopingCore()

    async def main() -> None:
        connecting = asyncio.create_task(FrontendToCore.connect(core.link.address, **(heard := Listener()).options()))
        while not connecting.done():
            core.turn(5)
            await asyncio.sleep(0)
        link = await connecting
        link.hold()
        link.send(add(link, 0))
        core.link.close(linger_s=0)
        assert link._connection._monitor.poll(20_000)  # it is known, but not to the loop, which has no turn
        while writable(link._connection._socket):
            os.sched_yield()
        for i in range(1, MAX_TOGETHER):
            link.send(add(link, i))
        with pytest.raises(LinkDown):
            link.send(add(link, MAX_TOGETHER))
        assert not link.connected and "has gone" in heard.log[1]
        await link.close()

    run(asyncio.wait_for(main(), 100))


class Looks:
    """How often the link has looked whether a message is there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self._wanted, self._enough = 0, asyncio.Event()
        look = frontend_link.readable

        def counted(socket: zmq.Socket) -> bool:
            self.count += 1
            if self.count == self._wanted:
                self._enough.set()
            return look(socket)

        monkeypatch.setattr(frontend_link, "readable", counted)

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
        link = await FrontendToCore.connect(core.address, **heard.options())
        for number in (1, 2):
            link.watch(60.0)
            link.watch(60.0)  # again: nothing more
            await looks.many()
            link.send(add(link, number))
            await looks.few()
            assert heard.tokens()[-1] == number
        link.watch(0.05)
        await looks.few()
        link.hold()
        link.watch(60.0)  # what is asked for has not left yet
        await looks.few()
        assert heard.tokens() == [1, 2] and len(heard.log) == 1
        link.watch(60.0)
        await link.close()
        link.watch(60.0)  # nothing to look at
        await looks.few()

    run(asyncio.wait_for(main(), 100))


def test_watching_ends_with_its_connection(run, monkeypatch, caplog):
    looks = Looks(monkeypatch)

    def provoke(scripted: ScriptedCore, link: FrontendToCore) -> None:
        link.watch(1e9)
        scripted.core.link.broadcast(ShuttingDown(9))

    loses(run, provoke, "shutting down")
    run(asyncio.wait_for(looks.few(), 100))
    assert not [r.message for r in caplog.records if r.name == "asyncio"]  # no callback has failed

"""FrontendToCore against real cores: greeting, files, messages both ways, and no core, or another kind of core."""

import asyncio
import time

import pytest
from frontend_to_core_cases import Listener, add, outputs
from ipc_cores import FILES, LoopingCore, make_welcome

from quire.ipc.links.frontend_to_core import FrontendToCore, LinkBusy, LinkDown
from quire.ipc.messages.frontend import (
    MAX_FRONTEND_MESSAGE,
    Abort,
    AddRequest,
    CoreMessage,
    FrontendMessage,
    Generate,
    StepOutputs,
    TokenInputs,
)
from quire.ipc.sampling import SamplingParams


def test_connects_with_welcome_and_files_and_exchanges_messages(run, make_core):
    core = make_core(epoch=4)

    async def main() -> None:
        heard = Listener()
        link = await FrontendToCore.connect(core.address, **heard.options())
        assert (link.connected, link.epoch, link.files) == (True, 4, FILES)
        assert link.welcome == make_welcome(4) and heard.log == [4]
        for i in range(100):
            link.send(add(link, i))
        await heard.until(lambda: len(heard.tokens()) == 100)
        assert heard.tokens() == list(range(100))
        assert [m.seq for m in heard.messages] == list(range(len(heard.messages)))
        await link.close()
        await link.close()
        assert heard.log == [4]  # closing is no loss
        with pytest.raises(LinkDown):
            link.send(Abort(4, [1]))

    run(main())


def test_a_link_whose_task_was_cancelled_is_down(run, make_core):
    """As at the end of asyncio.run, which cancels tasks in any order: others may still want to abort their requests."""
    core = make_core()

    async def main() -> None:
        heard = Listener()
        link = await FrontendToCore.connect(core.address, **heard.options())
        link.hold()
        link.send(Abort(link.epoch, [1]))  # goes with the connection
        (task,) = (t for t in asyncio.all_tasks() if t.get_name() == "core-link")
        task.cancel()
        await asyncio.wait([task])
        assert not link.connected
        with pytest.raises(LinkDown):
            link.send(Abort(1, [1]))
        link.hold()
        link.watch(1.0)
        await link.close()
        assert heard.log == [1]

    run(main())


def test_message_beyond_the_cores_limit_is_refused_here(run, make_core):
    core = make_core()

    async def main() -> None:
        link = await FrontendToCore.connect(core.address, **Listener().options())
        with pytest.raises(ValueError, match="longer"):
            link.send(AddRequest(link.epoch, 1, TokenInputs(bytes(MAX_FRONTEND_MESSAGE)), Generate(SamplingParams())))
        assert link.connected
        await link.close()

    run(main())


def test_send_says_busy_rather_than_wait(run):
    core = LoopingCore()

    async def main() -> None:
        connecting = asyncio.create_task(FrontendToCore.connect(core.link.address, **Listener().options()))
        while not connecting.done():
            core.turn(5)
            await asyncio.sleep(0)
        link = await connecting
        with pytest.raises(LinkBusy):
            for i in range(1_000_000):  # the core reads nothing
                link.send(Abort(link.epoch, [i]))
        await link.close()

    run(main())
    core.link.close(linger_s=0)


def test_a_failing_callback_does_not_stop_the_messages_after_it(run, make_core):
    core = make_core()

    async def main() -> None:
        heard, problems = Listener(), []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context["exception"]))

        def on_message(message: CoreMessage) -> None:
            heard.on_message(message)
            if isinstance(message, StepOutputs) and heard.tokens() == [0]:
                raise LookupError("as a bug would")

        link = await FrontendToCore.connect(core.address, on_message=on_message)
        for i in range(20):
            link.send(add(link, i))
        await heard.until(lambda: len(heard.tokens()) == 20)
        assert [type(p) for p in problems] == [LookupError]
        await link.close()

    run(main())


def test_frontend_that_is_busy_for_long_keeps_its_connection_and_its_tokens(run, make_core):
    """Its event loop stands still for longer than the silence it allows the core."""

    def answer(core: LoopingCore, identity: bytes, message: FrontendMessage) -> None:
        for i in range(50):
            core.link.send(identity, outputs(core.epoch, 0, i))

    core = make_core(answer, frontend_timeout_s=30.0)

    async def main() -> None:
        heard = Listener()
        link = await FrontendToCore.connect(core.address, **heard.options(), silence_s=0.5)
        link.send(add(link, 1))
        until = time.monotonic() + 1.2
        while time.monotonic() < until:  # no await
            pass
        await heard.until(lambda: len(heard.tokens()) == 50)
        assert heard.tokens() == list(range(50)) and len(heard.log) == 1
        await link.close()

    run(main())


def test_pings_are_sent(run, make_core, monkeypatch):
    monkeypatch.setattr("quire.ipc.links.frontend_to_core.PING_INTERVAL_S", 0.01)
    monkeypatch.setattr("quire.ipc.links.frontend_to_core._TICK_S", 0.01)
    core = make_core(frontend_timeout_s=0.6)

    async def main() -> None:
        heard = Listener()
        link = await FrontendToCore.connect(core.address, **heard.options())
        waited = asyncio.get_running_loop().time() + 1.0
        await heard.until(lambda: heard.log[1:] or asyncio.get_running_loop().time() > waited)
        assert heard.log == [1]
        await link.close()

    run(main())


def test_no_core_is_told_after_the_time_out(run, tmp_path):
    async def main() -> None:
        with pytest.raises(LinkDown, match=r"no engine .*: none listens at this address"):
            await FrontendToCore.connect(f"ipc://{tmp_path}/none", on_message=print, timeout_s=0.2)

    run(main())


@pytest.mark.parametrize(
    "address", ["ipc:", "ipc://relative", "tcp://127.0.0.1", "tcp://nowhere:1:2:3:x", "tcp://a b:1", "tcp://*:1"]
)
def test_address_that_cannot_be_used_is_an_error_at_once(run, address):
    async def main() -> None:
        with pytest.raises(ValueError, match=address.replace("*", r"\*")):
            await FrontendToCore.connect(address, on_message=print)

    run(main())


def test_waits_for_a_core_that_starts_later(run, tmp_path, make_core):
    address = f"ipc://{tmp_path}/core"

    async def main() -> None:
        connecting = asyncio.create_task(FrontendToCore.connect(address, **Listener().options()))
        await asyncio.sleep(0)
        make_core(address=address, epoch=3)
        link = await connecting
        assert link.epoch == 3
        await link.close()

    run(main())


def test_waits_patiently_for_a_core_that_still_loads(run):
    """No Welcome yet, only Heartbeats: longer than the silence that would make it give up."""
    core = LoopingCore(epoch=6)
    core.link._welcome = None

    async def main() -> None:
        heard = Listener()
        connecting = asyncio.create_task(FrontendToCore.connect(core.link.address, **heard.options(), silence_s=0.5))
        while not core.link._frontends:
            core.turn(5)
            await asyncio.sleep(0)
        first = next(iter(core.link._frontends))
        ready_at = time.monotonic() + 1.2
        while not connecting.done():
            core.turn(5)
            await asyncio.sleep(0)
            if time.monotonic() > ready_at:
                core.link.set_welcome(make_welcome(6), FILES)
        assert core.link.frontends == [first]  # the same connection all the while
        await connecting.result().close()

    run(main())
    core.link.close(linger_s=0)


def test_other_protocol_is_an_error_at_once(run, make_core, monkeypatch):
    core = make_core()
    monkeypatch.setattr("quire.ipc.links.frontend_to_core.PROTOCOL_VERSION", 99)

    async def main() -> None:
        with pytest.raises(LinkDown, match="protocol"):
            await FrontendToCore.connect(core.address, on_message=print)

    run(main())

"""FrontendToCore when its core is silent, wrong, gone or replaced: nothing is lost, doubled or mixed unsaid."""

import asyncio
import resource

import numpy as np
import pytest
from frontend_to_core_cases import Listener, ScriptedCore, add, echo, loses, outputs
from ipc_cores import FILES, LoopingCore, make_heartbeat

from quire.ipc.links.frontend_to_core import FrontendToCore, LinkDown
from quire.ipc.messages.frontend import AddRequest, FrontendMessage, Ping, ShuttingDown


def test_missing_outputs_lose_the_connection(run):
    def provoke(scripted: ScriptedCore, link: FrontendToCore) -> None:
        core_link = scripted.core.link
        (frontend,) = core_link._frontends.values()
        core_link.send(frontend.identity, outputs(9, 0, 1))
        frontend.next_seq += 1  # as if one had been dropped on the way
        core_link.send(frontend.identity, outputs(9, 0, 3))

    loses(run, provoke, "outputs were lost: expected number 1, got 2")


def test_silent_core_is_lost(run):
    def provoke(scripted: ScriptedCore, link: FrontendToCore) -> None:
        scripted.core.heartbeats = False

    loses(run, provoke, "silent", silence_s=0.5)


def test_refused_message_loses_the_connection(run):
    def provoke(scripted: ScriptedCore, link: FrontendToCore) -> None:
        link.send(Ping(12345))

    loses(run, provoke, "stale epoch")


def test_core_that_shuts_down_is_lost(run):
    def provoke(scripted: ScriptedCore, link: FrontendToCore) -> None:
        scripted.core.link.broadcast(ShuttingDown(9))

    loses(run, provoke, "shutting down")


def test_malformed_message_from_the_core_loses_the_connection(run):
    def provoke(scripted: ScriptedCore, link: FrontendToCore) -> None:
        (identity,) = scripted.core.link.frontends
        scripted.core.link._transmit(identity, b"\xc1 not a message")

    loses(run, provoke, "malformed")


def test_a_process_without_descriptors_left_connects_again_when_there_are_some(run):
    async def main() -> None:
        scripted, heard = ScriptedCore(epoch=9), Listener()
        connecting = asyncio.create_task(FrontendToCore.connect(scripted.core.link.address, **heard.options()))
        await scripted.until(connecting.done)
        channel = connecting.result()
        usual = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, usual[1]))
        try:
            scripted.core.link.broadcast(ShuttingDown(9))
            await scripted.until(lambda: "no connection can be made" in channel._reason)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, usual)
        await scripted.until(lambda: channel.connected)
        assert heard.log == [9, "the engine is shutting down", 9]
        await channel.close()
        scripted.core.link.close(linger_s=0)

    run(main())


def test_messages_of_another_epoch_are_dropped(run):
    async def main() -> None:
        scripted, heard = ScriptedCore(epoch=9), Listener()
        connecting = asyncio.create_task(FrontendToCore.connect(scripted.core.link.address, **heard.options()))
        await scripted.until(connecting.done)
        core_link = scripted.core.link
        (identity,) = core_link.frontends
        core_link._transmit(identity, core_link._encoder.encode(outputs(8, 0, 666)))
        core_link._transmit(identity, core_link._encoder.encode(ShuttingDown(8)))
        core_link._transmit(identity, core_link._encoder.encode(make_heartbeat(8)))
        core_link.send(identity, outputs(9, 0, 1))
        await scripted.until(lambda: heard.messages)
        assert heard.tokens() == [1] and heard.log == [9]
        await connecting.result().close()
        core_link.close(linger_s=0)

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
        link = await FrontendToCore.connect(address, **heard.options())
        next_id, sent = 0, {}
        for epoch in (1, 2, 3):
            await heard.until(lambda epoch=epoch: heard.log and heard.log[-1] == epoch)
            seen = len(heard.messages)
            assert link.epoch == epoch
            for _ in range(40):
                link.send(add(link, next_id))
                sent[next_id] = epoch
                next_id += 1
            await heard.until(lambda seen=seen: len([t for m in heard.messages[seen:] for t in m.tokens]) == 20 * 4)
            with pytest.raises(LinkDown):
                core.stop()
                for _ in range(100_000):  # into the dying connection: none may reach the successor
                    link.send(add(link, 10**6 + next_id))
                    await asyncio.sleep(0)
            if epoch < 3:
                core = make_core(answer_every_second, address=address, epoch=epoch + 1)
        got = [(m.epoch, t) for m in heard.messages for t in np.frombuffer(m.tokens, np.int32).tolist()]
        assert sorted(got) == sorted((epoch, i) for i, epoch in sent.items() if i % 2 == 0)
        assert all(message.epoch == core.epoch for core, _, message in held)
        assert {m.id for _, _, m in held if m.id < 10**6} == {i for i in sent if i % 2}
        assert not [m for c, _, m in held if m.id >= 10**6 and c.epoch != m.epoch]
        await link.close()

    run(main())


def test_files_already_held_are_not_sent_again(run, tmp_path, make_core):
    address = f"ipc://{tmp_path}/core"

    async def main() -> None:
        heard = Listener()
        core = make_core(address=address, epoch=1)
        link = await FrontendToCore.connect(address, **heard.options())
        core.stop()
        await heard.until(lambda: len(heard.log) == 2)
        second = make_core(address=address, epoch=2)
        second.core.link._files = {}  # it would refuse to give one
        await heard.until(lambda: len(heard.log) == 3)
        assert heard.log[2] == 2 and link.files == FILES
        await link.close()

    run(main())


def test_file_that_is_not_what_was_announced_is_never_served(run, make_core):
    core = make_core()
    core.core.link._files = dict.fromkeys(FILES, b"something else")

    async def main() -> None:
        with pytest.raises(LinkDown, match="not the one it announced"):
            await FrontendToCore.connect(core.address, on_message=print, timeout_s=0.5)

    run(main())

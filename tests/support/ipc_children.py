"""Child processes in tests of ipc/: started with `spawn("ipc_children", Role(...))`, they report lines of JSON."""

import asyncio
import os
import signal
import sys

import msgspec
import numpy as np

from quire.ipc.links.core_to_frontends import CoreToFrontends
from quire.ipc.links.frontend_to_core import FrontendToCore
from quire.ipc.messages.frontend import AddRequest, Generate, Heartbeat, StepOutputs, TokenInputs
from quire.ipc.process.children import child_main_config, heartbeat, spawn, tell_parent
from quire.ipc.sampling import SamplingParams
from quire.ipc.step.plan_ring import PlanReader, PlanRing


class Role(msgspec.Struct, kw_only=True):
    name: str
    report_fd: int = -1
    ring_fds: list[int] = []
    address: str = ""
    num_requests: int = 1
    text: str = ""


def main() -> None:
    """`--sigterm`: be told of the parent's death by SIGTERM, and have the time that a busy machine takes to put things away."""
    told = "--sigterm" in sys.argv
    role = child_main_config(Role, death_signal=signal.SIGTERM if told else signal.SIGKILL, grace_s=10.0 if told else 0.2)
    ROLES[role.name](role)


def report(role: Role, **values: object) -> None:
    os.write(role.report_fd, msgspec.json.encode(values) + b"\n")


def echo(role: Role) -> None:
    report(role, text=role.text, pid=os.getpid(), parent=os.getppid(), path=sys.path)


def teller(role: Role) -> None:
    """Tells its parent its text, and ends without another word."""
    tell_parent({"text": role.text})


def sends_heartbeats(role: Role) -> None:
    """Sends three heartbeats, and then hangs."""
    for _ in range(3):
        heartbeat()
    idle(role)


def idle(role: Role) -> None:
    report(role, pid=os.getpid())
    while True:
        signal.pause()


def busy(role: Role) -> None:
    """Ignores SIGTERM and never waits for anything."""
    signal.signal(signal.SIGTERM, lambda *_: None)
    report(role, pid=os.getpid())
    while True:
        pass


def reader(role: Role) -> None:
    ring = PlanReader.attach(role.ring_fds)
    report(role, pid=os.getpid())
    while (record := ring.read(60.0)) is not None:
        report(role, kind=record[0], sum=int(record[1].sum()))


def launcher(role: Role) -> None:
    core = Role(name="core", report_fd=role.report_fd)
    child = spawn("ipc_children", core, [role.report_fd], arguments=["--sigterm"])
    while child.poll() is None:
        signal.pause()


def core(role: Role) -> None:
    """A core with a worker: a link in a private folder, and a child that waits on a ring."""

    def on_sigterm(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a parent's death sends it twice, and we have something to put away
        sys.exit(0)

    signal.signal(signal.SIGTERM, on_sigterm)
    core_link = CoreToFrontends(epoch=1)
    ring = PlanRing.create(1024, 1)
    fds = ring.fds(0)
    child = spawn("ipc_children", Role(name="reader", report_fd=role.report_fd, ring_fds=fds), pass_fds=[*fds, role.report_fd])
    ring.write(1, np.arange(3, dtype=np.int32), 1.0)
    report(role, pid=os.getpid(), child=child.pid, address=core_link.address)
    while True:
        signal.pause()


def frontend(role: Role) -> None:
    """Asks for num_requests sequences with ids from 0 on and reports how many tokens came and whether in order."""
    asyncio.run(_ask(role))


async def _ask(role: Role) -> None:
    tokens: dict[int, list[int]] = {}
    finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_message(message: object) -> None:
        if isinstance(message, Heartbeat):
            return
        assert isinstance(message, StepOutputs)
        for key, token in zip(
            np.frombuffer(message.keys, np.int64).tolist(), np.frombuffer(message.tokens, np.int32).tolist(), strict=True
        ):
            tokens.setdefault(key, []).append(token)
        num_messages[0] += 1
        if len(message.finished) and not finished.done():
            finished.set_result(None)

    def on_lost(reason: str) -> None:
        report(role, lost=reason)

    num_messages = [0]
    link = await FrontendToCore.connect(role.address, on_message=on_message, on_lost=on_lost)
    for i in range(role.num_requests):
        link.send(AddRequest(link.epoch, i, TokenInputs(b"\1\0\0\0"), Generate(SamplingParams())))
    report(role, pid=os.getpid())
    await finished
    ordered = all(t == list(range(len(t))) for t in tokens.values())
    report(role, counts=[len(t) for t in tokens.values()], ordered=ordered, num_messages=num_messages[0])
    await link.close()


ROLES = {
    "echo": echo,
    "teller": teller,
    "sends_heartbeats": sends_heartbeats,
    "idle": idle,
    "busy": busy,
    "reader": reader,
    "launcher": launcher,
    "core": core,
    "frontend": frontend,
}

if __name__ == "__main__":
    main()

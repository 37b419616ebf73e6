"""Cores whose link is turned by the test, without heartbeats, and frontends made by hand."""

import pytest
from core_to_frontends_cases import EPOCH, answer
from ipc_cores import LoopingCore, RawFrontend

from quire.ipc.messages.frontend import PROTOCOL_VERSION, Hello, Welcome


@pytest.fixture
def make_core():
    cores = []

    def make(**options) -> LoopingCore:
        cores.append(LoopingCore(epoch=EPOCH, heartbeats=False, **options))
        return cores[-1]

    yield make
    for core in cores:
        core.link.close(linger_s=0)


@pytest.fixture
def core(make_core):
    return make_core()


@pytest.fixture
def make_frontend(core):
    frontends = []

    def make(hello: bool = True, at: LoopingCore = core) -> RawFrontend:
        frontends.append(RawFrontend(at.link.address))
        if hello:
            frontends[-1].send(Hello(PROTOCOL_VERSION))
            assert isinstance(answer(at, frontends[-1]), Welcome)
        return frontends[-1]

    yield make
    for frontend in frontends:
        frontend.close()

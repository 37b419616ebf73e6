"""The control link of core and workers: by rank and generation, with unreadable messages as a worker's failure."""

import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.ipc.links.core_and_workers import _IDENTITY, _TAG, CoreToWorkers, WorkerToCore
from quire.ipc.messages.media import MediaInfo
from quire.ipc.messages.workers import (
    AllocateKV,
    FullAttention,
    KVGroup,
    ProcessorsInfo,
    PromptLogprobsOfRow,
    SideResults,
    WorkerFailed,
    WorkerProfile,
    WorkerReady,
)
from quire.ipc.numerics import Numerics
from quire.ipc.pooling import PoolingInfo


@pytest.fixture
def core_link():
    core_link = CoreToWorkers(generation=3)
    yield core_link
    core_link.close()
    core_link.close()


@pytest.fixture
def make_worker(core_link):
    workers = []

    def make(rank: int, generation: int = 3) -> WorkerToCore:
        workers.append(WorkerToCore(core_link.address, rank, generation))
        return workers[-1]

    yield make
    for worker in workers:
        worker.close()


def make_profile(rank: int) -> WorkerProfile:
    values = dict.fromkeys(WorkerProfile.__struct_fields__, 16)
    given = {
        "rank": rank,
        "kv_groups": [KVGroup(FullAttention(), [0, 1])],
        "device": "cpu",
        "processors": ProcessorsInfo(True, False),
    }
    given["media"] = MediaInfo(["image"], 64)
    given["pooling"] = PoolingInfo(["embed"], "LAST", embedding_size=8)
    given["numerics"] = Numerics("float32", "fp8", "fp8_e4m3", True, 3, ["Mine"])
    return WorkerProfile(**values | given)


def receive(core_link: CoreToWorkers, count: int = 1) -> list:
    got: list = []
    poller = zmq.Poller()
    for socket in core_link.sockets():
        poller.register(socket, zmq.POLLIN)
    while len(got) < count:
        assert poller.poll(20_000), "nothing has come"
        got += core_link.receive()
    return got


def test_start_up_conversation(core_link, make_worker):
    workers = [make_worker(0), make_worker(1)]
    profiles = [make_profile(r) for r in range(2)]
    for worker, profile in zip(workers, profiles, strict=True):
        worker.send(profile)
    assert sorted(receive(core_link, 2)) == list(enumerate(profiles))
    for rank, worker in enumerate(workers):
        assert core_link.send(rank, AllocateKV(100 + rank))
        assert worker.receive(20.0) == AllocateKV(100 + rank)
        assert worker.receive(0.0) is None
        worker.send(WorkerReady(rank))
    assert sorted(receive(core_link, 2)) == [(0, WorkerReady(0)), (1, WorkerReady(1))]


def test_large_results_arrive(core_link, make_worker):
    floats, ints = np.zeros(100_000, np.float32).tobytes(), np.arange(100_000, dtype=np.int32).tobytes()
    message = SideResults(0, 5, [PromptLogprobsOfRow(1, floats, ints, ints, floats)])
    make_worker(0).send(message)
    assert receive(core_link) == [(0, message)]


def test_worker_of_an_earlier_generation_is_not_heard(core_link, make_worker):
    make_worker(0, generation=2).send(WorkerFailed(0, "from the past"))
    core_link.generation = 3
    make_worker(0).send(WorkerReady(0))
    assert receive(core_link) == [(0, WorkerReady(0))]
    core_link.generation = 4
    assert not core_link.send(0, AllocateKV(1))


def test_unreadable_message_is_the_workers_failure(core_link, make_worker):
    make_worker(1)._socket.send(b"\xc1")
    ((rank, message),) = receive(core_link)
    assert rank == 1 and isinstance(message, WorkerFailed) and "cannot be read" in message.message


def test_message_in_another_workers_name_is_a_failure(core_link, make_worker):
    make_worker(1).send(WorkerReady(0))
    ((rank, message),) = receive(core_link)
    assert rank == 1 and isinstance(message, WorkerFailed)


def test_strangers_are_not_heard(core_link, make_worker):
    context = zmq.Context()
    for identity in (b"x", b"y" * 16):
        with context.socket(zmq.DEALER) as stranger:
            stranger.set(zmq.ROUTING_ID, identity)
            stranger.connect(core_link.address)
            stranger.send(b"\xc1")
            stranger.linger = 1000
    context.term()
    make_worker(0).send(WorkerReady(0))
    assert receive(core_link) == [(0, WorkerReady(0))]


def test_no_bytes_raise_in_the_core(core_link):
    @settings(max_examples=200, deadline=None)
    @given(st.binary(max_size=100))
    def try_one(data: bytes) -> None:
        assert core_link._decode(7, data).rank == 7

    try_one()


def test_unreadable_command_is_an_error_of_the_worker(core_link, make_worker):
    worker = make_worker(0)
    worker.send(WorkerReady(0))
    receive(core_link)
    core_link._router.send_multipart([_IDENTITY.pack(_TAG, 3, 0), b"junk"])
    with pytest.raises(ValueError, match="cannot be read"):
        worker.receive(20.0)


def test_dead_worker_is_no_error(core_link, make_worker):
    assert not core_link.send(5, AllocateKV(1))


def test_last_words_arrive_after_close(core_link, make_worker):
    worker = make_worker(0)
    worker.send(WorkerFailed(0, "out of memory"))
    worker.close()
    worker.close()
    assert receive(core_link) == [(0, WorkerFailed(0, "out of memory"))]

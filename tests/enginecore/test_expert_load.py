"""How evenly experts are used, over ranks and over the stages that hold them."""

from types import SimpleNamespace

import msgspec

from quire.enginecore.expert_load import INTERVAL_S, ExpertLoad
from quire.ipc.messages.stats import ExpertStats, ExpertTokens
from quire.ipc.messages.workers import ControlReply


class Workers:
    """Two ranks to a stage, which answer when the test says so."""

    def __init__(self, num_stages: int, enabled: bool = True) -> None:
        self.world_size, self.is_ready = 2 * num_stages, True
        engine = SimpleNamespace(pipeline_parallel_size=num_stages, enable_expert_parallel=enabled)
        self.template = SimpleNamespace(engine=engine)
        self.asked: list = []

    def send_control(self, make, on_reply) -> None:
        make(1)
        self.asked.append(on_reply)

    def reply(self, rank: int, payload: bytes = b"", error: str = "") -> None:
        self.asked[-1](ControlReply(rank, 1, error, payload))


def tokens(by_rank: list[int], busiest: int) -> bytes:
    return msgspec.msgpack.encode(ExpertTokens(by_rank, busiest))


def test_all_stages_count_and_one_rank_of_each():
    workers = Workers(3)
    load = ExpertLoad(workers)
    load.turn(1, 0.0)
    for rank in range(6):
        payload = {0: tokens([3, 1], 3), 4: tokens([10, 20], 20)}.get(rank, b"")  # the second stage has no experts
        workers.reply(rank, payload or (tokens([99, 99], 99) if rank % 2 else b""))
    assert load.so_far() == ExpertStats([13, 21], 23 / 17)
    load.turn(2, INTERVAL_S)
    assert len(workers.asked) == 2
    workers.reply(0, tokens([1, 1], 1))
    load.turn(3, 2 * INTERVAL_S)
    assert len(workers.asked) == 2  # two stages have not answered
    workers.reply(2)
    workers.reply(4, error="it ended")
    load.turn(3, 2 * INTERVAL_S)
    assert len(workers.asked) == 3 and load.so_far() == ExpertStats([14, 22], 24 / 18)


def test_nothing_without_expert_parallelism():
    workers = Workers(2, enabled=False)
    load = ExpertLoad(workers)
    load.turn(5, 10.0)
    assert not workers.asked and load.so_far() is None

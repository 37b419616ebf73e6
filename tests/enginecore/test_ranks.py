"""What the core does for a model's ranks: their store, who keeps the others waiting, GPUs that cannot be, profiles as one."""

import msgspec
import pytest

from quire.enginecore.core import STEPS_OF_STAGE
from quire.enginecore.device import Gpu, unfit_for_ranks
from quire.enginecore.group_store import GroupStore
from quire.enginecore.silent_ranks import GRACE_S, SilentRanks
from quire.enginecore.worker_profiles import WorkersFailed, profile_of_all
from quire.ipc.messages.group import StoreRequest
from quire.ipc.messages.workers import FullAttention, KVGroup, SlidingWindow, WorkerProfile
from quire.ipc.step.result_ring import result_depth


def test_a_value_is_given_when_it_is_there():
    said: list[tuple[int, bytes]] = []
    store = GroupStore(lambda rank, answer: said.append((rank, answer.value)))
    store.handle(StoreRequest(1, "get", "id"))
    store.handle(StoreRequest(2, "get", "id"))
    store.handle(StoreRequest(1, "check", "id"))
    assert said == [(1, b"0")]
    store.handle(StoreRequest(0, "set", "id", b"x\0y"))
    assert said[1:] == [(1, b"x\0y"), (2, b"x\0y")]
    store.handle(StoreRequest(0, "get", "id"))
    store.handle(StoreRequest(0, "check", "id"))
    assert said[3:] == [(0, b"x\0y"), (0, b"1")]


def test_sums():
    said: list[tuple[int, bytes]] = []
    store = GroupStore(lambda rank, answer: said.append((rank, answer.value)))
    store.handle(StoreRequest(2, "get", "n"))
    for rank, amount in ((0, b"1"), (1, b"4")):
        store.handle(StoreRequest(rank, "add", "n", amount))
    assert said == [(2, b"1"), (0, b"1"), (1, b"5")]


def verdict(
    spoken: list[int], stopped: list[int], size: int = 3, after_s: float = 0.0, stage_size: int | None = None
) -> str | None:
    silent = SilentRanks(10.0, stage_size)
    for rank in spoken:
        silent.heard(rank, f"{rank} waits", 100.0)
    return silent.verdict(stopped, size, 100.0 + after_s)


def test_who_says_nothing_is_at_fault():
    assert verdict([], []) is None and verdict([], [1]) is None
    assert verdict([0], []) is None and verdict([0, 2], []) is None  # more may speak
    late = GRACE_S + 0.1
    assert verdict([0, 2], [], after_s=late) == (
        "worker 1 was silent in an exchange for --collective-timeout-s (10 s); worker 0 says: 0 waits"
    )
    assert verdict([0], [], size=4, after_s=late) == (
        "workers 1, 2 and 3 were silent in an exchange for --collective-timeout-s (10 s); worker 0 says: 0 waits"
    )
    assert verdict([0, 1, 2], []) == "the exchange between the workers failed: worker 0 says: 0 waits"


@pytest.mark.parametrize(
    ("stage_size", "spoken", "named"),
    [
        (1, [2], "worker 1 was"),  # the third stage waits for the second; the first has done its part
        (1, [1, 2], "worker 0 was"),
        (1, [0], "worker 3 was"),  # the first waits for tokens
        (1, [0, 2, 3], "worker 1 was"),
        (2, [3], "worker 2 was"),  # of a stage itself one waits for the other
        (2, [2, 3], "workers 0 and 1 were"),
        (2, [0, 1, 3], "worker 2 was"),
        (4, [0, 3], "workers 1 and 2 were"),
    ],
)
def test_of_a_model_in_stages_those_are_at_fault_that_are_waited_for(stage_size, spoken, named):
    assert str(verdict(spoken, [], 4, GRACE_S + 0.1, stage_size)).startswith(f"{named} silent in an exchange")


def test_who_is_stopped_is_at_fault_at_once():
    assert verdict([0], [2]) == "worker 2 was stopped by a signal; the others waited in an exchange"


def test_who_is_stopped_while_none_waits_in_an_exchange_is_named_before_the_timeout():
    times = iter([0.0, 0.5, 1.0, 600.0, 600.5, *(601.0 + i for i in range(12))])
    silent = SilentRanks(10.0, clock=lambda: next(times))

    def look(*stopped):
        return silent.stopped_for_long(stopped, "the workers still start")

    assert look(1) is None and look() is None  # it has gone on
    assert look(0, 1) is None and look(1) is None  # all stood still till then
    assert [look(1) for _ in range(8)] == [None] * 8
    assert look(1) == "worker 1 was stopped by a signal 9 s ago, and the workers still start"


def test_gpus_that_cannot_share_a_model_are_named():
    h200, h100 = Gpu("NVIDIA H200", 1), Gpu("NVIDIA H100", 1)
    assert unfit_for_ranks([h200], 1) is None and unfit_for_ranks([h200, h200, h100], 2) is None
    assert unfit_for_ranks([h200, h200], 4) == (
        "--tensor-parallel-size 4: so many GPUs are needed, and 2 are there (CUDA_VISIBLE_DEVICES counts)"
    )
    assert "1 is there" in str(unfit_for_ranks([h200], 2))
    assert unfit_for_ranks([h200, h100], 2) == (
        "--tensor-parallel-size 2: these GPUs differ (NVIDIA H200, NVIDIA H100); choose equal ones by CUDA_VISIBLE_DEVICES"
    )


def test_gpus_that_cannot_hold_stages_are_named():
    h200, h100 = Gpu("NVIDIA H200", 1), Gpu("NVIDIA H100", 1)
    assert unfit_for_ranks([h200] * 4, 2, 2) is None
    assert unfit_for_ranks([h200] * 2, 1, 4) == (
        "--pipeline-parallel-size 4: so many GPUs are needed, and 2 are there (CUDA_VISIBLE_DEVICES counts)"
    )
    assert unfit_for_ranks([h200] * 2, 2, 3) == (
        "--tensor-parallel-size 2 and --pipeline-parallel-size 3: 6 GPUs are needed, and 2 are there "
        "(CUDA_VISIBLE_DEVICES counts)"
    )
    assert str(unfit_for_ranks([h200, h100], 1, 2)).startswith("--pipeline-parallel-size 2: these GPUs differ")


@pytest.mark.parametrize(("stages", "depth"), [(1, 8), (2, 8), (3, 16), (4, 16), (5, 32), (64, 256)])
def test_the_ring_of_results_remembers_twice_what_is_in_flight(stages, depth):
    assert result_depth(stages) == depth >= 2 * STEPS_OF_STAGE * stages


def test_blocks_are_the_least_and_bytes_the_most_of_all_ranks():
    first = WorkerProfile(0, 70, 16, [KVGroup(FullAttention(), [0, 1])], 512, "NVIDIA H200, bfloat16", 10, 5, 100)
    second = msgspec.structs.replace(first, rank=1, num_blocks=60, weights_bytes=12, activation_bytes=4, block_bytes=150)
    both = profile_of_all([first, second])
    assert (both.num_blocks, both.weights_bytes, both.activation_bytes, both.block_bytes) == (60, 12, 5, 150)
    assert both.device == "2 x NVIDIA H200, bfloat16" and profile_of_all([first]) == first
    with pytest.raises(WorkersFailed, match="worker 1 has other KV groups than worker 0"):
        profile_of_all([first, msgspec.structs.replace(second, kv_groups=[KVGroup(SlidingWindow(8), [0, 1])])])

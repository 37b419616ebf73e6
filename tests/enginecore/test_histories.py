"""Histories that a review found, each of which once broke the scheduler, and many random ones of their kind."""

import math
import random
import time

import numpy as np
import pytest
from kv_kinds import FULL
from scheduler_harness import Harness

from quire.enginecore.intake import Intake, IntakeConfig
from quire.enginecore.scheduling.config import SchedulerConfig
from quire.enginecore.scheduling.scheduler import Scheduler
from quire.enginecore.tenants.backlog import Room
from quire.ipc.messages.frontend import AddRequest, EngineLimits, Generate, RequestError, TokenInputs
from quire.ipc.sampling import SamplingParams
from quire.ipc.step.samples import Samples
from quire.ipc.step.sections import HEADER, SLOT_VALUES, StepLimits, max_device_words


def scenario(seed, windows, look):
    r = random.Random(seed)
    nb = {(8,): r.randint(6, 12), (0, 8): r.randint(20, 30), (0,): r.randint(12, 20)}[windows]
    h = Harness(
        num_blocks=nb,
        windows=windows,
        budget=r.choice([8, 32]),
        max_model_len=48,
        eos=range(0, 50, 11),
        look_ahead=look,
        policy=r.choice(["fcfs", "priority"]),
    )
    for _ in range(r.randint(2, 12)):
        fam = r.randint(0, 1)
        prompt, max_tokens, priority = [fam] * 3 + list(range(r.randint(1, 24))), r.randint(2, 16), r.randint(0, 2)
        if not h.scheduler.fits(min(48, len(prompt) + max_tokens)):
            continue
        h.add(prompt, max_tokens, priority=priority)
        for _ in range(r.randint(0, 4)):
            h.turn()
    h.run()
    h.assert_right()


@pytest.mark.parametrize("seed,look", [(980, True), (2074, True), (84, False), (114, False)])
def test_a_preempted_sequence_may_end_with_its_last_result_beside_another_end(seed, look):
    scenario(seed, (0,), look)


@pytest.mark.parametrize("seed", [43, 239, 546])
def test_a_sequence_admitted_by_a_step_that_had_no_rows_is_still_told_to_the_workers(seed):
    scenario(seed, (8,), True)


@pytest.mark.parametrize("windows", [(0,), (8,), (0, 8)])
@pytest.mark.parametrize("look", [True, False])
def test_many_histories(windows, look):
    for seed in range(120):
        scenario(seed, windows, look)


@pytest.mark.parametrize("prompt_len,num_blocks,budget", [(8, 5, 1), (3, 4, 1), (3, 4, 2), (9, 5, 2)])
def test_a_row_that_is_preempted_in_its_turn_leaves_the_step_to_the_next(prompt_len, num_blocks, budget):
    """More rows than budget: the one whose turn it was made room for nobody, and the core slept until its next heartbeat."""
    h = Harness(num_blocks=num_blocks, block_size=8, max_num_seqs=3, budget=budget, max_model_len=32, look_ahead=False)
    for _ in range(3):
        h.add([*range(prompt_len)], max_tokens=8 * (num_blocks - 1) - prompt_len)
    h.run(depth=1)
    assert h.scheduler.counters.preemptions > 0
    h.assert_right()


def test_no_plan_is_longer_than_the_worker_has_room_for():
    mml, bs, seqs, budget = 131072, 64, 1024, 8192  # a GPU's defaults
    s = Scheduler(SchedulerConfig(seqs, budget, mml, bs, 20_000, FULL, vocab_size=1000))
    it = Intake(IntakeConfig(EngineLimits(mml, 1000, seqs, 20), (), True, False, 0, 8192), s.kv.hasher)
    prompt = (np.arange(16384) % 1000).astype(np.int32)
    for q in it.accept(
        0, AddRequest(0, 1, TokenInputs(prompt.tobytes()), Generate(SamplingParams(n=128, max_tokens=8))), Room()
    ):
        s.add(q)
    longest, flight = 0, []
    while not s.is_idle:
        made = s.schedule()
        if made:
            longest = max(longest, int(made[0].encode()[HEADER.at["device_words"]]))
            flight.append(made[1])
        if flight and (len(flight) > 1 or not made):
            step = flight.pop(0)
            s.update(step, Samples.one_a_row(np.zeros(len(step.slots), np.int32)), 0.0)
    assert longest <= max_device_words(StepLimits(seqs, budget, bs, 1, -(-mml // bs)))


@pytest.mark.parametrize(
    "params",
    [
        {"min_tokens": 2**31 - 1, "max_tokens": 2**40},
        {"temperature": 1e39, "min_p": 1.0},
        {"top_p": 1e-46},
        {"repetition_penalty": 1e-300},
    ],
)
def test_legal_extremes_make_a_plan_of_finite_numbers(params):
    s = Scheduler(SchedulerConfig(4, 64, 128, 16, 40, FULL, vocab_size=100))
    it = Intake(IntakeConfig(EngineLimits(128, 100, 4, 20), (), True, False, 0, 100), s.kv.hasher)
    accepted = it.accept(
        0, AddRequest(0, 1, TokenInputs(np.arange(3, dtype=np.int32).tobytes()), Generate(SamplingParams(**params))), Room()
    )
    assert not isinstance(accepted, RequestError)
    for seq in accepted:
        s.add(seq)
    slot = s.schedule()[0].section("slot_updates")[0]
    floats = {v.name: float(slot[v.name]) for v in SLOT_VALUES if v.dtype == "float32"}
    assert all(map(math.isfinite, floats.values())) and floats["top_p"] > 0 and floats["repetition"] > 0


def test_what_is_refused_at_the_door():
    s = Scheduler(SchedulerConfig(4, 64, 128, 16, 40, FULL, vocab_size=100))
    it = Intake(IntakeConfig(EngineLimits(128, 100, 4, 20), (7,), True, False, 0, 100), s.kv.hasher)
    prompt = np.arange(3, dtype=np.int32).tobytes()
    too_many = SamplingParams(allowed_token_ids=[5] * 101)
    only_the_end = SamplingParams(allowed_token_ids=[7], min_tokens=2)
    for params in (too_many, only_the_end):
        assert isinstance(it.accept(0, AddRequest(0, 1, TokenInputs(prompt), Generate(params)), Room()), RequestError)
    assert isinstance(it.accept(0, AddRequest(0, 1, TokenInputs(b"abc"), Generate(SamplingParams())), Room()), RequestError)
    assert isinstance(
        it.accept(0, AddRequest(0, 1, TokenInputs(np.asarray([100], np.int32).tobytes()), Generate(SamplingParams())), Room()),
        RequestError,
    )


@pytest.mark.parametrize(("said", "is_taken"), [(-0.5, True), (-59, True), (-3600, False), (3600, False), (-1e12, False)])
def test_the_clock_of_another_host_is_not_ours(said, is_taken, monkeypatch):
    """Else a request would have waited an hour, by the metrics."""
    monkeypatch.setattr(time, "time", lambda: 1e9)
    s = Scheduler(SchedulerConfig(4, 64, 128, 16, 40, FULL, vocab_size=100))
    it = Intake(IntakeConfig(EngineLimits(128, 100, 4, 20), (), True, False, 0, 9), s.kv.hasher)
    prompt = np.arange(3, dtype=np.int32).tobytes()
    (seq,) = it.accept(0, AddRequest(0, 1, TokenInputs(prompt), Generate(SamplingParams()), arrival_time=1e9 + said), Room())
    assert seq.arrival_time == (1e9 + said if is_taken else 1e9)


@pytest.mark.parametrize("by_priority", [False, True])
def test_a_priority_that_would_not_count_is_refused(by_priority):
    s = Scheduler(SchedulerConfig(4, 64, 128, 16, 40, FULL, vocab_size=100))
    it = Intake(IntakeConfig(EngineLimits(128, 100, 4, 20), (), True, by_priority, 0, 9), s.kv.hasher)
    prompt = np.arange(3, dtype=np.int32).tobytes()
    usual, urgent = (
        it.accept(0, AddRequest(0, 1, TokenInputs(prompt), Generate(SamplingParams()), priority), Room())
        for priority in (0, -3)
    )
    assert usual[0].order[0] == 0
    if by_priority:
        assert urgent[0].order[0] == -3
    else:
        assert urgent.code == "invalid" and "--scheduling-policy priority" in urgent.message


def test_more_choices_than_may_wait_will_not_fit_later_either():
    s = Scheduler(SchedulerConfig(4, 64, 128, 16, 40, FULL, vocab_size=100))
    it = Intake(IntakeConfig(EngineLimits(128, 100, 4, 20), (), True, False, 0, 3), s.kv.hasher)
    prompt = np.arange(3, dtype=np.int32).tobytes()
    codes = [it.accept(0, AddRequest(0, 1, TokenInputs(prompt), Generate(SamplingParams(n=n))), Room(1)).code for n in (3, 4)]
    assert codes == ["overloaded", "invalid"]


def test_without_prefix_caching_only_the_children_of_one_request_share():
    s = Scheduler(SchedulerConfig(4, 64, 128, 16, 40, FULL, False, vocab_size=100))
    it = Intake(IntakeConfig(EngineLimits(128, 100, 4, 20), (), False, False, 0, 100), s.kv.hasher)
    prompt = np.arange(40, dtype=np.int32).tobytes()
    for _ in range(2):  # an id may be used again when its request has ended
        first, second = it.accept(0, AddRequest(0, 1, TokenInputs(prompt), Generate(SamplingParams(n=2, max_tokens=2))), Room())
        for seq in (first, second):
            s.add(seq)
        while not s.is_idle:
            _, step = s.schedule()
            s.update(step, Samples.one_a_row(np.zeros(len(step.slots), np.int32)), 0.0)
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32)

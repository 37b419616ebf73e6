"""The scheduler as a list of events: every request ends exactly once with its own tokens, and no block is lost or misread."""

import itertools
from collections import deque

import numpy as np
import pytest
from fake_worker import FakeWorker, solo_output
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.enginecore.kv.pool import BlockPool
from quire.enginecore.kv.sequence_blocks import SequenceBlocks
from quire.enginecore.scheduling.config import SchedulerConfig
from quire.enginecore.scheduling.prefill_budget import SMOOTH_TOKENS
from quire.enginecore.scheduling.scheduler import Scheduler
from quire.enginecore.scheduling.sequence import Sequence
from quire.ipc.messages import sequence_key
from quire.ipc.sampling import SamplingParams

VOCAB = 50


class Harness:
    """Scheduler and fake worker joined as the core joins them: up to two steps in flight, results in order."""

    def __init__(
        self, *, num_blocks=40, block_size=4, windows=(0,), max_num_seqs=4, budget=16, max_model_len=64, eos=(), **more
    ):
        self.eos = set(eos)
        self.config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            block_size=block_size,
            num_blocks=num_blocks,
            windows=windows,
            eos_token_ids=tuple(eos),
            vocab_size=VOCAB,
            **more,
        )
        self.scheduler = Scheduler(self.config)
        self.worker = FakeWorker(max_num_seqs + 1, max_model_len // block_size + 1, block_size, windows, VOCAB)
        self.in_flight: deque = deque()
        self.outputs: dict[int, list[int]] = {}
        self.finished: dict[int, str] = {}
        self.sequences: dict[int, Sequence] = {}
        self.names: dict[int, int] = {}  # key -> name; a request's first child has its id for a name
        self.plans: list = []
        self.count = 0

    def add(self, prompt, max_tokens=8, *, n=1, salt=b"", **more):
        """A request of n children, of the same root as Intake gives them; returns the first one's name."""
        own = b"" if self.config.enable_prefix_caching else str(self.count).encode()
        root, request_id = self.scheduler.kv.hasher.root(salt, own), self.count + 1
        for child in range(n):
            self._add_child(prompt, max_tokens, request_id, child, root, n=n, **more)
        return request_id

    def _add_child(self, prompt, max_tokens, request_id, child, root, *, n, priority=0, owner=0, ignore_eos=False, **params):
        self.count += 1
        p = SamplingParams(n=n, max_tokens=max_tokens, ignore_eos=ignore_eos, **params)
        seq = Sequence(
            owner=owner,
            key=sequence_key(request_id, child),
            request_id=request_id,
            child=child,
            params=p,
            prompt=np.asarray(prompt, np.int32),
            final_len=min(len(prompt) + max_tokens, self.config.max_model_len),
            seed=self.count,
            order=(priority, self.count),
            arrival_time=0.0,
            stop_ids=frozenset(p.stop_token_ids or ()),
            blocks=SequenceBlocks(
                root, self.config.enable_prefix_caching or n > 1, may_hit=p.prompt_logprobs is None or child > 0
            ),
        )
        assert self.scheduler.fits(seq.final_len)
        self.sequences[self.count] = seq
        self.names[seq.key] = self.count
        self.outputs[self.count] = []
        self.scheduler.add(seq)

    def schedule(self):
        made = self.scheduler.schedule(now=1.0)
        self.scheduler.check()
        if made is not None:
            plan, step = made
            assert plan.num_tokens <= self.config.max_num_batched_tokens
            self.plans.append(plan)
            self.in_flight.append((step, self.worker.run(plan)))
        return made

    def collect(self):
        step, tokens = self.in_flight.popleft()
        out = self.scheduler.update(step, tokens)
        self.scheduler.check()
        for key, token in zip(out.keys.tolist(), out.tokens.tolist(), strict=True):
            assert self.names[key] not in self.finished, "a token after the end"
            self.outputs[self.names[key]].append(token)
        for _, f in out.finished:
            assert self.names[f.key] not in self.finished, "ended twice"
            self.finished[self.names[f.key]] = f.reason

    def turn(self, depth=2):
        """As the core's loop: fill the pipeline, then take the oldest result."""
        while len(self.in_flight) < depth and self.schedule() is not None:
            pass
        if self.in_flight:
            self.collect()
            return True
        return False

    def run(self, depth=2, limit=10_000):
        for _ in range(limit):
            if not self.turn(depth):
                break
        assert self.scheduler.is_idle, "something is stuck"
        assert self.scheduler.kv.pool.num_used == 0

    def expected(self, name):
        seq = self.sequences[name]
        eos = set(seq.stop_ids) | (set() if seq.params.ignore_eos else self.eos)
        return solo_output(seq.prompt.tolist(), seq.final_len, eos, VOCAB)

    def assert_right(self):
        for name in self.finished:
            assert self.outputs[name] == self.expected(name), f"request {name} got other tokens than alone"


@pytest.mark.parametrize("depth", [1, 2])
def test_requests_get_the_tokens_they_would_get_alone(depth):
    h = Harness()
    names = [h.add(list(range(n, n + 5 * n)), max_tokens=10) for n in range(1, 7)]
    h.run(depth)
    assert set(h.finished) == set(names)
    h.assert_right()


def test_a_long_prompt_is_chunked_under_the_budget_and_mixed_with_decode():
    h = Harness(budget=8, num_blocks=60)
    first = h.add([1, 2, 3], max_tokens=20)
    h.turn()
    h.add(list(range(40)), max_tokens=4)
    h.run()
    mixed = [p for p in h.plans if len(p.decode_rows) and len(p.prefill_rows)]
    assert len(mixed) >= 5 and len(h.outputs[first]) == 20
    h.assert_right()


def test_a_prompt_beside_decode_rows_is_spread_over_steps():
    h = Harness(num_blocks=200, budget=64, max_model_len=200, max_num_seqs=8, smooth_tokens=12)
    prompts = [[p] * length for p, length in enumerate((60, 100, 5, 30))]

    def chunks():
        return [n for n in [plan.num_tokens - len(plan.decode_rows) for plan in h.plans] if n]

    h.add(prompts[0], 40)
    while not h.outputs[1]:
        h.turn(depth=1)
    assert chunks() == [60]  # nobody waits for it
    h.add(prompts[1], 30)
    while not h.outputs[2]:
        h.turn(depth=1)
    # half of what waits, then about 12 less the decode row; all while the first decodes
    assert chunks()[1:] == [50, 25, 12, 7, 6]
    h.plans.clear()
    h.add(prompts[2], 30)
    h.add(prompts[3], 30)
    while not h.outputs[4]:
        h.turn(depth=1)
    assert chunks() == [17, 9, 9]  # of both together; then a third row decodes
    h.run()
    h.assert_right()


def test_only_what_can_start_counts_as_waiting():
    def first_chunk(max_num_seqs=8, processors=8, more=(), **params):
        """Prefill tokens of the step after a prompt of 60, and `more` behind it, came beside one decode row."""
        h = Harness(
            num_blocks=400,
            budget=64,
            max_model_len=200,
            max_num_seqs=max_num_seqs,
            num_processor_rows=processors,
            smooth_tokens=12,
        )
        h.add([1], 40, presence_penalty=1.0)
        while not h.outputs[1]:
            h.turn(depth=1)
        h.add([2] * 60, 5, **params)
        for prompt, other in more:
            h.add(prompt, 5, **other)
        plan, _ = h.schedule()
        h.run()
        h.assert_right()
        return plan.num_tokens - len(plan.decode_rows)

    others = [([3 + n] * 60, {}) for n in range(4)]
    assert first_chunk() == 30
    assert first_chunk(more=others[:1]) == 63  # more than there are decode rows: all that the step has room for
    assert first_chunk(more=others, max_num_seqs=2) == 30  # they have no slot
    assert first_chunk(n=4) == 30  # one computes the prompt for all
    for_row = [([9 + n] * 60, {"presence_penalty": 1.0}) for n in range(4)]
    assert first_chunk(more=for_row, processors=1) == 30  # they wait for a row
    assert first_chunk(more=[*for_row, *others], processors=1) == 63  # but hold up nobody


@pytest.mark.parametrize(("length", "expected"), [(9, [9]), (12, [12]), (13, [7, 6]), (22, [11, 11])])
def test_a_prompt_takes_equal_steps_and_none_for_a_rest(length, expected):
    h = Harness(num_blocks=200, budget=64, max_model_len=200, max_num_seqs=8, smooth_tokens=12)
    h.add([1], 40)
    while not h.outputs[1]:
        h.turn(depth=1)
    h.plans.clear()
    h.add([2] * length, 5)
    while not h.outputs[2]:
        h.turn(depth=1)
    assert [n for n in [plan.num_tokens - len(plan.decode_rows) for plan in h.plans] if n] == expected


@pytest.mark.parametrize(("num_prompts", "expected"), [(1, 20), (3, 60), (4, 125)])
def test_where_more_wait_for_their_first_token_than_for_their_next_all_goes_at_once(num_prompts, expected):
    h = Harness(num_blocks=400, budget=128, max_model_len=200, max_num_seqs=8, smooth_tokens=12)
    for n in range(3):
        h.add([n], 40)
    while not all(h.outputs[n] for n in (1, 2, 3)):
        h.turn(depth=1)
    for n in range(num_prompts):
        h.add([10 + n] * 40, 5)
    plan, _ = h.schedule()
    assert (plan.num_tokens - len(plan.decode_rows), len(plan.decode_rows)) == (expected, 3)
    h.run()
    h.assert_right()


def test_an_aborted_prompt_that_had_no_room_hides_nobody():
    h = Harness(num_blocks=60, budget=64, max_model_len=200, max_num_seqs=8, smooth_tokens=12)
    h.add([1] * 60, 100)
    while not h.outputs[1]:
        h.turn(depth=1)
    big = h.add([2] * 150, 20)
    h.turn(depth=1)
    assert not h.outputs[big]
    h.scheduler.abort(0, h.sequences[big].request_id)
    for n in range(3):
        h.add([3 + n] * 20, 4)
    plan, _ = h.schedule()
    assert plan.num_tokens - len(plan.decode_rows) == 60  # three prompts, more than there are decode rows


def test_many_decode_rows_leave_a_prompt_its_least():
    h = Harness(num_blocks=200, budget=64, max_model_len=200, max_num_seqs=16, smooth_tokens=12)
    for n in range(10):
        h.add([n], 50)
    for _ in range(4):
        h.turn(depth=1)
    h.plans.clear()
    h.add([11] * 20, 5)
    while not h.outputs[11]:
        h.turn(depth=1)
    assert [plan.num_tokens - len(plan.decode_rows) for plan in h.plans] == [10, 5, 5]
    assert all(len(plan.decode_rows) == 10 for plan in h.plans)
    h.run()
    h.assert_right()


def test_unchanged_decode_rows_cost_no_words():
    h = Harness(block_size=16, num_blocks=20)
    h.add([1, 2, 3], max_tokens=10)
    h.run()
    steady = [p for p in h.plans[2:] if p.same_decode_rows]
    assert len(steady) >= 6 and all(p.encode().size == 32 for p in steady)


def test_a_tiny_pool_preempts_and_changes_no_token():
    h = Harness(num_blocks=14, block_size=4, max_num_seqs=4, look_ahead=False)
    for n in range(4):
        h.add([n] * 6, max_tokens=30)
    h.run()
    assert h.scheduler.counters.preemptions > 0
    assert len(h.finished) == 4
    h.assert_right()


def test_a_cached_prefix_is_hit_in_whole_blocks_and_never_the_last_token():
    h = Harness()
    prompt = list(range(12))
    h.add(prompt, max_tokens=2)
    h.run()
    again = h.add(prompt, max_tokens=2)
    h.run()
    assert h.sequences[again].num_cached_tokens == 8  # of 12: a third block would leave nothing to compute
    longer = h.add([*prompt, 1, 2], max_tokens=2)
    h.run()
    assert h.sequences[longer].num_cached_tokens == 12
    h.assert_right()


def test_equal_prompts_that_arrive_together_are_computed_once():
    h = Harness(budget=64)
    prompt = list(range(20))
    names = [h.add(prompt, max_tokens=3) for _ in range(4)]
    h.run()
    assert [h.sequences[n].num_cached_tokens for n in names] == [0, 16, 16, 16]
    h.assert_right()


def test_a_shared_prompt_is_room_for_all_who_share_it():
    """Admission looks ahead to the end: the blocks of a long prompt are needed once, not once more for each that comes."""
    h = Harness(num_blocks=30, max_model_len=128, budget=128)  # 20 blocks of prompt, and 2 more for each
    for n in range(4):
        h.add([*range(80), n], max_tokens=7, ignore_eos=True)
    most = 0
    while h.turn():
        most = max(most, h.scheduler.num_running)
    assert most == 4 and h.scheduler.counters.preemptions == 0
    h.assert_right()


def test_another_salt_hits_nothing():
    h = Harness()
    for salt in (b"a", b"b"):
        name = h.add(list(range(12)), max_tokens=2, salt=salt)
        h.run()
        assert h.sequences[name].num_cached_tokens == 0


def test_decoded_blocks_are_hit_by_the_next_turn_of_a_conversation():
    h = Harness(num_blocks=60)
    first = h.add([1, 2, 3], max_tokens=13)
    h.run()
    turn = h.add([1, 2, 3, *h.outputs[first], 9], max_tokens=2)
    h.run()
    assert h.sequences[turn].num_cached_tokens == 12  # the last of 15 computed tokens fill no block; 16 were never computed


def test_priority_runs_first_and_fcfs_does_not_care():
    for policy, first in (("priority", 3), ("fcfs", 1)):
        h = Harness(max_num_seqs=1, policy=policy, num_blocks=20)
        for priority in (2, 1, 0):
            h.add([priority + 1] * 4, max_tokens=3, priority=priority)
        h.run()
        assert next(iter(h.finished)) == first


def test_eos_ends_at_once_and_is_not_followed_by_the_wasted_row():
    h = Harness(eos=range(0, 50, 3))
    names = [h.add([n, n + 1], max_tokens=40) for n in range(6)]
    other = h.add([1, 2], max_tokens=12, ignore_eos=True)
    h.run()
    assert all(h.finished[n] == "stop" for n in names) and h.finished[other] == "length"
    h.assert_right()


def test_own_stop_ids_count_only_for_their_request():
    h = Harness()
    token = h.expected(h.add([1, 2], max_tokens=10))[3]
    stopper = h.add([1, 2], max_tokens=10, stop_token_ids=[token])
    h.run()
    assert len(h.outputs[1]) == 10 and h.outputs[stopper] == h.outputs[1][: h.outputs[1].index(token) + 1]


def test_processor_rows_are_a_resource_that_requests_wait_for():
    h = Harness(num_processor_rows=1, num_blocks=60)
    for n in range(3):
        h.add([n + 1] * 3, max_tokens=5, presence_penalty=1.0)
    h.add([9, 9], max_tokens=5)
    h.run()
    assert len(h.finished) == 4
    assert sum(len(p.processors) > 0 for p in h.plans) == 3


def test_what_cannot_fit_is_known_beforehand():
    s = Harness(num_blocks=8, block_size=4).scheduler
    assert s.fits(28) and not s.fits(29)
    assert not Harness().scheduler.fits(65)


def test_a_sliding_window_runs_in_a_pool_far_smaller_than_the_sequence():
    h = Harness(windows=(8,), num_blocks=5, block_size=4, max_model_len=128, budget=16)
    h.add(list(range(40)), max_tokens=60)
    h.run()
    h.assert_right()


def test_aborted_owner_leaves_nothing():
    h = Harness()
    mine = h.add([1, 2, 3], max_tokens=20)
    theirs = h.add([4, 5, 6], max_tokens=20, owner=1)
    h.turn()
    assert h.scheduler.abort_owner(1) == 1
    h.run()
    assert mine in h.finished and theirs not in h.finished


def test_a_crowd_that_leaves_at_once_costs_each_the_same(monkeypatch):
    """Looking at all that leave whenever one does stopped everybody's streams for 46 ms when 1024 were aborted in flight."""
    h = Harness(num_blocks=1000, max_num_seqs=64, budget=256)
    for n in range(64):
        h.add([n % VOCAB, 1], max_tokens=20)
    h.turn()
    h.schedule()
    assert h.scheduler.num_running == 64 and len(h.in_flight) == 2
    looks = []
    monkeypatch.setattr(h.scheduler.kv, "remove_pending", looks.append)
    leaving = h.scheduler._leaving
    monkeypatch.setattr(leaving, "let_go", lambda: looks.extend(leaving._leaving))
    h.scheduler.abort_owner(0)
    assert len(looks) == 64
    monkeypatch.undo()
    h.run()


def test_the_first_that_waits_is_looked_at_again_only_when_something_was_given_back(monkeypatch):
    """A long cached prefix is expensive to look up: 2 ms a step for 100k tokens."""
    h = Harness(num_blocks=20, max_num_seqs=4, budget=64)
    h.add([1, 2, 3], max_tokens=30, ignore_eos=True)
    h.turn()
    big = h.add(list(range(40)), max_tokens=24, ignore_eos=True)
    lookups = []
    find_prefix = h.scheduler.kv.find_prefix
    monkeypatch.setattr(h.scheduler.kv, "find_prefix", lambda held, n: lookups.append(held) or find_prefix(held, n))
    while 1 not in h.finished:
        h.turn()
    assert lookups == [h.sequences[big].blocks]
    h.run()
    assert len(lookups) == 2
    h.assert_right()


def test_reset_ends_what_ran_and_keeps_what_waits():
    h = Harness(max_num_seqs=2)
    names = [h.add([n] * 8, max_tokens=10) for n in range(1, 5)]
    h.turn()
    gone = h.scheduler.reset()
    h.scheduler.check()
    assert [s.request_id for s in gone] == names[:2]
    h.in_flight.clear()
    h.worker = FakeWorker(3, 17, 4, (0,), VOCAB)
    h.run()
    assert set(h.finished) == set(names[2:])
    h.assert_right()


def test_block_pool_evicts_the_least_recently_used():
    pool = BlockPool(4, 1)
    blocks = [pool.allocate() for _ in range(3)]
    for i, b in enumerate(blocks):
        pool.register(0, b, bytes([i]))
    pool.release(blocks)
    pool.take(pool.find(0, b"\0"))
    pool.release([blocks[0]])
    pool.allocate()
    assert pool.find(0, b"\1") is None and pool.find(0, b"\0") is not None
    with pytest.raises(AssertionError):
        pool.release([blocks[0], blocks[0]])


requests = st.fixed_dictionaries(
    {
        "prompt": st.integers(1, 30),
        "max_tokens": st.integers(1, 25),
        "family": st.integers(0, 2),
        "priority": st.integers(0, 2),
        "salt": st.sampled_from([b"", b"x"]),
        "penalty": st.booleans(),
        "ignore_eos": st.booleans(),
        "n": st.integers(1, 3),
    }
)
events = st.lists(
    st.one_of(
        st.tuples(st.just("add"), requests),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("finish"), st.integers(0, 30)),
        st.tuples(st.just("schedule"), st.none()),
        st.tuples(st.just("collect"), st.none()),
    ),
    max_size=60,
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    events=events,
    blocks=st.integers(16, 40),
    windows=st.sampled_from([(0,), (6,), (0, 8), (0, 5, 9)]),
    budget=st.sampled_from([1, 3, 8, 32]),
    seqs=st.integers(1, 6),
    caching=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority"]),
    processors=st.integers(1, 2),
    eos=st.booleans(),
    look_ahead=st.booleans(),
    smooth=st.sampled_from([SMOOTH_TOKENS, 4]),
)
def test_any_history_ends_every_request_once_with_its_own_tokens(
    events, blocks, windows, budget, seqs, caching, policy, processors, eos, look_ahead, smooth
):
    h = Harness(
        num_blocks=blocks * len(windows),
        windows=windows,
        budget=budget,
        max_num_seqs=seqs,
        enable_prefix_caching=caching,
        policy=policy,
        num_processor_rows=processors,
        look_ahead=look_ahead,
        eos=range(0, VOCAB, 11) if eos else (),
        smooth_tokens=smooth,
    )
    aborted = set()
    for what, arg in events:
        if what == "add":
            prompt = [arg["family"]] * 3 + list(range(arg["prompt"]))
            params = {"presence_penalty": 1.0} if arg["penalty"] else {}
            more = {name: arg[name] for name in ("n", "priority", "salt", "ignore_eos")}
            h.add(prompt, arg["max_tokens"], **more, **params)
        elif what == "abort" and h.count:
            request_id = h.sequences[arg % h.count + 1].request_id
            children = {name for name, s in h.sequences.items() if s.request_id == request_id}
            live = children - aborted - set(h.finished)
            assert h.scheduler.abort(0, request_id) == len(live)
            aborted |= live
            h.scheduler.check()
        elif what == "finish" and h.count:  # one child alone; the others go on
            name = arg % h.count + 1
            h.scheduler.finish(0, h.sequences[name].key)
            aborted |= {name} - set(h.finished)
            h.scheduler.check()
        elif what == "schedule" and len(h.in_flight) < 2:
            h.schedule()
        elif what == "collect" and h.in_flight:
            h.collect()
    h.run()
    assert set(h.finished) | aborted == set(h.sequences) and not set(h.finished) & aborted
    h.assert_right()


arrivals = st.fixed_dictionaries(
    {
        "prompt": st.integers(1, 14),
        "max_tokens": st.integers(1, 8),
        "family": st.integers(0, 2),
        "n": st.integers(1, 2),
    }
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    requests=st.lists(arrivals, min_size=1, max_size=8),
    blocks=st.integers(8, 30),
    windows=st.sampled_from([(0,), (6,), (0, 8)]),
    budget=st.sampled_from([1, 2, 3, 8, 32]),
    seqs=st.integers(1, 5),
    caching=st.booleans(),
    look_ahead=st.booleans(),
)
def test_under_endless_arrivals_each_request_ends_within_what_stood_before_it(
    requests, blocks, windows, budget, seqs, caching, look_ahead
):
    """fcfs, and one more request in every turn for as long as the first ones last: nobody starves.

    The bound, with S = max_num_seqs and L the longest sequence: a request that comes when W tokens (prompt and output, its own
    included) are unfinished has ended (2 S + 4) (W + S L) turns later. Look at the oldest unfinished sequence. The queue is in
    order of arrival, prefills are computed in that order, and it is the latest that is preempted, so those that come later can
    take from it only turns: a decode row's turn comes once in S steps, in two times S where a budget of 1 alternates, and where
    its block must come back first, it does within the two steps in flight before and after. So it gets a token in 2 S + 4
    turns, and what stood before it is W such tokens. The one exception is a sequence that waits for a prefix that another one
    computes: those behind pass it meanwhile, S of them at most, of L tokens each, and then it is the first to come in.
    """
    h = Harness(
        num_blocks=blocks * len(windows),
        windows=windows,
        budget=budget,
        max_num_seqs=seqs,
        max_model_len=32,
        enable_prefix_caching=caching,
        look_ahead=look_ahead,
    )
    longest = 3 + 14 + 8
    due: dict[int, int] = {}  # name -> turn by which it has ended
    coming, turn = itertools.cycle(requests), 0
    while turn < len(requests) or due:
        r, before = next(coming), h.count
        h.add([r["family"]] * 3 + list(range(r["prompt"])), r["max_tokens"], n=r["n"])
        if turn < len(requests):
            work = sum(s.final_len for name, s in h.sequences.items() if name not in h.finished)
            for name in range(before + 1, h.count + 1):
                due[name] = turn + (2 * seqs + 4) * (work + seqs * longest)
        assert h.turn()
        turn += 1
        due = {name: last for name, last in due.items() if name not in h.finished}
        assert all(turn <= last for last in due.values()), "a request starves"
    h.assert_right()

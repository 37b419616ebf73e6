"""Adapter slots: sequences run with their own adapter's slot only, none that has one waits for one that has not, and each
adapter gets its turn."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_harness import Harness

from quire.enginecore.adapters.registry import AdapterRegistry
from quire.enginecore.adapters.slots import KEEP_S, AdapterSlots, key_of
from quire.enginecore.scheduling.sequence import SequenceState
from quire.ipc.adapters import AdapterFile, AdapterPlan
from quire.ipc.speculative_config import SpeculativeConfig


def plan_of(name, invocation=()):
    return AdapterPlan(AdapterFile(f"/{name}", 1, 2, 3, 4), [], invocation_tokens=tuple(invocation))


def adapters(count, invocation=()):
    registry = AdapterRegistry()
    made = [registry.make(f"a{i}", plan_of(f"a{i}", invocation), 0.0) for i in range(count)]
    for adapter in made:
        registry.add(adapter)
    registry.check()
    return made


def not_wanted(adapter):
    return False


def served(h, limit=2000):
    """Run to the end; loads take a turn."""
    for now in range(limit):
        h.load(now)
        h.adapters_turn(now)
        if not h.turn() and not h.loading and h.scheduler.is_idle:
            return
    raise AssertionError("something is stuck")


def test_each_sequence_computes_with_its_own_adapter():
    h, made = Harness(num_adapter_slots=2, num_blocks=200, max_num_seqs=6), adapters(4)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    for adapter in (None, *made, None, *made):
        h.add(prompt, adapter=adapter)
    served(h)
    h.assert_right()
    assert len(h.finished) == 10
    outputs = {tuple(h.outputs[name]) for name in h.finished}
    assert len(outputs) == 5, "each adapter changes the answer"


def test_a_step_says_whether_a_row_has_an_adapter():
    h, made = Harness(num_adapter_slots=2), adapters(1)
    h.add([1, 2, 3], max_tokens=2)
    h.run()
    assert not any(plan.has_adapters for plan in h.plans)
    h.add([1, 2, 3], max_tokens=2, adapter=made[0])
    served(h)
    assert h.plans[-1].has_adapters


def test_prefixes_are_shared_within_an_adapter_only():
    h, made = Harness(num_adapter_slots=4, num_blocks=200), adapters(2)
    prompt = list(range(1, 14))
    cached = []
    for adapter in (None, made[0], made[1], None, made[0], made[1]):
        name = h.add(prompt, adapter=adapter)
        served(h)
        cached.append(h.sequences[name].num_cached_tokens)
    assert cached == [0, 0, 0, 12, 12, 12]
    h.assert_right()


def test_an_activated_adapter_shares_what_lies_before_its_invocation():
    h, (adapter, other) = Harness(num_adapter_slots=4, num_blocks=200, max_model_len=80), adapters(2, invocation=(7, 8))
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]  # blocks of 4: the invocation begins in the second one
    cached = []
    for each in (None, adapter, other, adapter):
        name = h.add(prompt, adapter=each)
        served(h)
        cached.append(h.sequences[name].num_cached_tokens)
        h.assert_right()
    assert cached == [0, 4, 4, 12]
    assert h.sequences[name].adapter_from == 6
    name = h.add(prompt, adapter=None)
    served(h)
    assert h.sequences[name].num_cached_tokens == 12, "the base hits its own blocks only"
    h.assert_right()


def test_the_last_occurrence_of_the_invocation_counts_and_its_place_is_in_the_hash():
    h, (adapter, _) = Harness(num_adapter_slots=4, num_blocks=200, max_model_len=80), adapters(2, invocation=(7,))
    first = [1, 2, 7, 4, 5, 6, 9, 10, 11]
    again = [1, 2, 7, 7, 5, 6, 9, 10, 11]
    assert adapter.start_in(np.asarray(first, np.int32)) == 2 and adapter.start_in(np.asarray(again, np.int32)) == 3
    longer = [*first[:3], 4, 5, 6, 9, 10, 7, 1, 1, 1, 1]  # same first blocks, but the adapter applies from position 8 on
    for prompt in (first, again, longer, longer):
        name = h.add(prompt, adapter=adapter)
        served(h)
        h.assert_right()
    assert h.sequences[name].num_cached_tokens == 12
    assert h.sequences[3].num_cached_tokens == 0, "blocks that the adapter has changed are no base blocks"


def test_without_its_invocation_the_base_answers():
    h, (adapter, _) = Harness(num_adapter_slots=1), adapters(2, invocation=(7, 8, 9))
    name = h.add([1, 2, 3, 7, 8], adapter=adapter)
    h.run()
    assert h.sequences[name].adapter is None
    h.add([7, 8], adapter=adapter)  # shorter than the invocation
    h.run()
    h.assert_right()


def test_long_chains_copy_no_hashes_across_a_fork():
    """Chains of at least LONG_CHAIN blocks take over hashes from those begun lately."""
    h, (adapter, other) = Harness(num_adapter_slots=4, num_blocks=300, max_model_len=80), adapters(2, invocation=(7, 8))
    prompt = [1] * 20 + [7, 8] + [2] * 30
    cached = []
    for each in (None, adapter, other, None, adapter, other):
        name = h.add(prompt, max_tokens=4, adapter=each)
        served(h)
        h.assert_right()
        cached.append(h.sequences[name].num_cached_tokens)
    assert cached == [0, 20, 20, 48, 48, 48]


def test_who_has_a_slot_does_not_wait_behind_one_who_has_not():
    h, (a, b) = Harness(num_adapter_slots=1, num_blocks=200), adapters(2)
    h.add([1, 2, 3], max_tokens=30, adapter=a)
    h.schedule()
    h.adapters_turn()
    h.load()
    h.turn()
    waits = h.add([1, 2, 3], max_tokens=3, adapter=b)
    passes = h.add([1, 2, 3, 4], max_tokens=3, adapter=a)
    base = h.add([1, 2, 3, 5], max_tokens=3)
    for _ in range(12):
        h.adapters_turn()
        h.turn()
    assert passes in h.finished and base in h.finished and not h.outputs[waits]
    assert [s.request_id for s in h.scheduler.waiting.aside(key_of(b))] == [waits]
    served(h)
    h.assert_right()


def test_a_slot_is_given_away_only_when_the_last_step_that_uses_it_has_returned():
    h, (a, b) = Harness(num_adapter_slots=1), adapters(2)
    first = h.add([1, 2, 3], max_tokens=20, adapter=a)
    h.schedule()
    h.adapters_turn()
    h.load()
    h.schedule()
    h.add([4, 5, 6], adapter=b)
    h.schedule()  # two steps in flight
    h.scheduler.abort(0, first)
    h.adapters_turn()
    assert not h.loading, "two steps use it"
    h.collect()
    h.adapters_turn()
    assert not h.loading, "one step does"
    h.collect()
    h.adapters_turn()
    assert [load.adapter for load in h.loading] == [b]
    served(h)
    h.assert_right()


def test_the_least_recently_used_adapter_goes_first():
    h, (a, b, c) = Harness(num_adapter_slots=2), adapters(3)
    slots = h.scheduler.leases.adapters
    for adapter in (a, b, a):
        h.add([1, 2, 3], max_tokens=2, adapter=adapter)
        served(h)
    h.add([1, 2, 3], max_tokens=2, adapter=c)
    served(h)
    assert slots.slot_of(b) is None and slots.slot_of(a) is not None and slots.num_evictions == 1


def test_an_adapter_that_others_crowd_out_gets_its_turn():
    """Two adapters are asked for without end, and there are two slots."""
    h, (a, b, c) = Harness(num_adapter_slots=2, max_queue_s=30.0, num_blocks=400, max_num_seqs=8), adapters(3)
    late, asked_at = None, 0.0
    for now in range(60):
        h.load(float(now))
        h.adapters_turn(float(now))
        h.add([now % 40, 2, 3], max_tokens=6, adapter=(a, b)[now % 2])
        if now == 10:
            late, asked_at = h.add([9, 9, 9], max_tokens=4, adapter=c), float(now)
        h.turn()
        if late in h.finished:
            break
    assert late in h.finished and now - asked_at < 30.0
    assert now - asked_at >= 15.0, "it has waited in peace for half of the time"
    served(h)
    h.assert_right()


def test_a_closed_slot_opens_again_if_nobody_waits_any_more():
    slots, (a, b) = AdapterSlots(1, 10.0), adapters(2)
    slots.want(a)
    (load,) = slots.turn(0.0, not_wanted)
    slots.loaded(load, 0.0)
    seq = Harness(num_adapter_slots=1).scheduler  # any object with the attributes of a sequence
    seq.adapter, seq.adapter_slot = a, -1
    slots.take(seq)
    slots.want(b)
    slots.turn(1.0, not_wanted)
    slots.turn(7.0, not_wanted)
    assert slots.slot_of(a).is_closed and slots.waits_for(seq) == key_of(a)
    slots.unwant(b)
    slots.take_resolved()
    slots.turn(8.0, not_wanted)
    assert slots.slot_of(a).is_open and slots.take_resolved() == [key_of(a)]


def test_a_loaded_adapter_stays_until_its_sequences_could_start():
    slots, (a, b) = AdapterSlots(1, 10.0), adapters(2)
    slots.want(a)
    (load,) = slots.turn(0.0, not_wanted)
    slots.loaded(load, 0.0)
    slots.want(b)
    assert not slots.turn(KEEP_S / 2, not_wanted)
    assert not slots.turn(KEEP_S, lambda adapter: adapter is a)
    assert not slots.turn(1.5 * KEEP_S, not_wanted)
    assert slots.turn(2 * KEEP_S, not_wanted)[0].adapter is b


def test_a_failed_load_leaves_the_slot_empty():
    slots, (a, b) = AdapterSlots(1, 10.0), adapters(2)
    slots.want(a)
    (load,) = slots.turn(0.0, not_wanted)
    slots.failed(load)
    assert not slots.wanted and slots.slot_of(a) is None
    slots.want(b)
    assert slots.turn(0.0, not_wanted)[0].adapter is b
    slots.check([])


requests = st.tuples(st.integers(1, 25), st.integers(1, 20), st.integers(0, 6), st.integers(1, 2))
events = st.lists(
    st.one_of(
        st.tuples(st.just("add"), requests),
        st.tuples(st.just("add"), requests),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.sampled_from(["schedule", "collect", "turn", "load", "die"]), st.none()),
        st.tuples(st.just("fail"), st.none()),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(events=events, slots=st.integers(1, 3), seqs=st.integers(1, 5), blocks=st.integers(20, 40), drafts=st.booleans(),
       states=st.sampled_from([0, 0, 9]))  # fmt: skip
def test_any_history_of_adapters_ends_every_request_with_its_own_tokens(events, slots, seqs, blocks, drafts, states):
    plain, activated = adapters(4), adapters(2, invocation=(3, 4))
    made = [None, *plain, *activated]
    for adapter, number in zip(activated, (8, 9), strict=True):
        object.__setattr__(adapter, "number", number)
    speculation = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1) if drafts else None
    h = Harness(
        num_adapter_slots=slots, max_num_seqs=seqs, num_blocks=blocks, max_queue_s=4.0, speculation=speculation,
        num_states=states,
    )  # fmt: skip
    clock, gone = itertools.count(), set()
    for what, arg in events:
        match what:
            case "add":
                length, max_tokens, which, n = arg
                h.add([0] + list(range(length)), min(max_tokens, 40), n=n, adapter=made[which])
            case "abort" if arg < h.count:
                seq = list(h.sequences.values())[arg]
                gone |= {s.key for s in h.sequences.values() if s.request_id == seq.request_id}
                h.scheduler.abort(0, seq.request_id)
            case "schedule" if len(h.in_flight) < h.depth:
                h.schedule()
            case "collect" if h.in_flight:
                h.collect()
            case "turn":
                h.adapters_turn(float(next(clock)))
            case "load":
                h.load(float(next(clock)))
            case "fail" if h.loading:
                load = h.loading.pop()
                for seq in h.scheduler.waiting.aside(key_of(load.adapter)):
                    gone |= {s.key for s in h.sequences.values() if s.request_id == seq.request_id}
                    h.scheduler.abort(0, seq.request_id)
                h.scheduler.leases.adapters.failed(load)
            case "die":
                h.die()
        h.scheduler.check()
    for now in itertools.count(100):
        assert now < 3000, "something is stuck"
        h.load(float(now))
        h.adapters_turn(float(now))
        if not h.turn() and not h.loading and h.scheduler.is_idle:
            break
    h.assert_right()
    ended = {h.names[key] for key in h.names if key not in gone}
    assert ended <= h.finished.keys()
    assert all(seq.state is SequenceState.FINISHED and seq.adapter_slot < 0 for seq in h.sequences.values())


@pytest.mark.parametrize("mutation", ["hash", "slot"])
def test_the_fake_worker_notices_what_it_should(mutation, monkeypatch):
    """A number that is not in the hash, and a slot that is given away too early, change tokens."""
    h, (a, b) = Harness(num_adapter_slots=1, num_blocks=200), adapters(2)
    if mutation == "hash":
        monkeypatch.setattr(type(h.scheduler.kv.hasher), "root", lambda self, *parts: b"r" * 16)
    else:
        monkeypatch.setattr(AdapterSlots, "give_back", lambda self, seq: None)
        monkeypatch.setattr("quire.enginecore.adapters.slots.AdapterSlot.can_be_given", lambda self, now: not self.is_loading)
        monkeypatch.setattr(AdapterSlots, "check", lambda self, held: None)
        monkeypatch.setattr("quire.enginecore.scheduling.sequence.Slots.check", lambda self, held: None)
    h.add(list(range(1, 14)), max_tokens=20, adapter=a)
    for now in range(2):
        h.schedule()
        h.adapters_turn(now)
        h.load(now)
    for _ in range(3 if mutation == "slot" else 40):
        h.turn()
    h.add(list(range(1, 14)), max_tokens=20, adapter=b)
    with pytest.raises(AssertionError):
        served(h, 100)
        h.assert_right()

"""Any history of events: every request ends once with its own tokens, and under endless arrivals nobody starves."""

import itertools

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from scheduler_harness import VOCAB, Harness

from quire.enginecore.scheduling.prefill_budget import MIXED_STEP_TOKENS
from quire.ipc.speculative_config import SpeculativeConfig
from quire.ipc.step.sections import SECTIONS, StepLimits, max_samples_of

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
ONE = {"family": 0, "priority": 0, "salt": b"", "penalty": False, "ignore_eos": False}
events = st.lists(
    st.one_of(
        st.tuples(st.just("add"), requests),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("finish"), st.integers(0, 30)),
        st.tuples(st.just("schedule"), st.none()),
        st.tuples(st.just("collect"), st.none()),
        st.tuples(st.just("die"), st.none()),
        st.tuples(st.sampled_from(["defer", "drop_row", "release"]), st.integers(0, 30)),
    ),
    max_size=60,
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    events=events,
    blocks=st.integers(16, 40),
    windows=st.sampled_from([(0,), (6,), (0, 8), (0, 5, 9), ()]),
    budget=st.sampled_from([1, 3, 8, 32]),
    seqs=st.integers(1, 6),
    caching=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority"]),
    eos=st.booleans(),
    look_ahead=st.booleans(),
    target=st.sampled_from([MIXED_STEP_TOKENS, 4]),
    micro_batches=st.sampled_from([1, 1, 2, 3]),
    states=st.sampled_from([0, 0, 3, 5, 9, 20]),
    chunk=st.sampled_from([4, 8]),
)
def test_any_history_ends_every_request_once_with_its_own_tokens(
    events, blocks, windows, budget, seqs, caching, policy, eos, look_ahead, target, micro_batches, states, chunk
):
    h = Harness(
        num_blocks=max(blocks * len(windows), 1),
        windows=windows,
        budget=budget,
        max_num_seqs=seqs,
        enable_prefix_caching=caching,
        policy=policy,
        look_ahead=look_ahead,
        eos=range(0, VOCAB, 11) if eos else (),
        mixed_step_tokens=target,
        num_micro_batches=micro_batches,
        num_states=states or 9 * (not windows),
        state_chunk=chunk,
    )
    live_through(h, events)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    first=st.lists(requests, min_size=1, max_size=5),
    events=events,
    blocks=st.integers(16, 60),
    windows=st.sampled_from([(0,), (0,), (0, 8), (0, 5, 9)]),
    budget=st.sampled_from([3, 8, 32, 100]),
    seqs=st.integers(1, 6),
    caching=st.booleans(),
    eos=st.booleans(),
    look_ahead=st.booleans(),
    drafts=st.sampled_from([1, 3, 15]),
    adapts=st.booleans(),
    has_model=st.booleans(),
    states=st.sampled_from([0, 0, 3, 5, 9, 20]),
    chunk=st.sampled_from([4, 8, 16]),
)
# The state of a row with its last token in flight is not copied: nothing goes on there.
@example(
    first=[{**ONE, "prompt": 1, "max_tokens": 5, "n": 2}],
    events=[],
    blocks=16,
    windows=(0,),
    budget=3,
    seqs=1,
    caching=False,
    eos=False,
    look_ahead=False,
    drafts=1,
    adapts=True,
    has_model=True,
    states=3,
    chunk=4,
)
def test_any_history_with_drafts_ends_every_request_once_with_its_own_tokens(
    first, events, blocks, windows, budget, seqs, caching, eos, look_ahead, drafts, adapts, has_model, states, chunk
):
    drafter = {"method": "draft_model", "model": "any"} if has_model else {"method": "ngram", "prompt_lookup_min": 1}
    h = Harness(
        num_blocks=blocks * len(windows),
        windows=windows,
        budget=budget,
        max_num_seqs=seqs,
        enable_prefix_caching=caching,
        look_ahead=look_ahead,
        eos=range(0, VOCAB, 11) if eos else (),
        speculation=SpeculativeConfig(num_speculative_tokens=drafts, enable_adaptive_verification=adapts, **drafter),
        num_states=states,
        state_chunk=chunk,
    )
    live_through(h, [*(("add", request) for request in first), *events])
    assert all(plan.num_samples <= max_samples_of(seqs) for plan in h.plans)
    blocks_per_seq = -(-h.config.max_model_len // h.config.block_size)
    limits = StepLimits(seqs, budget, h.config.block_size, len(windows), blocks_per_seq, max_samples_of(seqs))
    most = next(section.cap(limits) for section in SECTIONS if section.name == "block_updates")
    assert all(len(plan.section("block_updates")) <= most for plan in h.plans)


def live_through(h, events):
    aborted, salts = set(), {}
    for what, arg in events:
        if what == "add":
            prompt = [arg["family"]] * 3 + list(range(arg["prompt"]))
            params = {"presence_penalty": 1.0} if arg["penalty"] else {}
            more = {name: arg[name] for name in ("n", "priority", "salt", "ignore_eos")}
            begun = h.add(prompt, arg["max_tokens"], **more, **params)
            salts |= dict.fromkeys(range(begun, h.count + 1), arg["salt"])
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
        elif what == "schedule" and len(h.in_flight) < h.depth:
            h.schedule()
        elif what == "collect" and h.in_flight:
            h.collect()
        elif what == "die":
            h.die()
        elif what in ("defer", "drop_row") and h.in_flight:
            h.defer(arg, from_this_step_on=what == "drop_row")
        elif what == "release":
            h.release(arg)
    for _ in range(h.count):
        h.release(0)
    h.run()
    assert set(h.finished) | aborted == set(h.sequences) and not set(h.finished) & aborted
    for name, salt in salts.items():  # continue what was answered: from what the cache keeps of it
        text = [*h.sequences[name].prompt.tolist(), *h.outputs[name]]
        if len(text) < h.config.max_model_len - 1:
            h.add([*text, 1], 1, salt=salt)
    h.run()
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
    drafts=st.sampled_from([0, 1, 15]),
    has_model=st.booleans(),
)
def test_under_endless_arrivals_each_request_ends_within_what_stood_before_it(
    requests, blocks, windows, budget, seqs, caching, look_ahead, drafts, has_model
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
    drafter = {"method": "draft_model", "model": "any"} if has_model else {"method": "ngram"}
    h = Harness(
        num_blocks=blocks * len(windows),
        windows=windows,
        budget=budget,
        max_num_seqs=seqs,
        max_model_len=32,
        enable_prefix_caching=caching,
        look_ahead=look_ahead,
        speculation=SpeculativeConfig(num_speculative_tokens=drafts, **drafter) if drafts else None,
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

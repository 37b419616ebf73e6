"""Dispatcher and Stream without sockets: what a consumer gets of the messages that have arrived, and what the core is told."""

import asyncio
import gc

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stream_bench import BANG, CAT, COMMA, EOS, THE, TOKENIZER, WORLD, Bench, in_loop, key, rest

from quire.frontend.client.outputs import Delta, Logprob
from quire.frontend.client.stream import ClientError, EngineDown, EngineError
from quire.ipc.messages.frontend import Abort, Finish, PromptLogprobs, Started, TokenLogprobs


@in_loop
async def test_what_arrived_since_the_last_turn_is_one_delta(bench: Bench) -> None:
    stream = bench.submit()
    bench.arrive([(1, THE)])
    bench.arrive([(1, CAT)])
    assert await anext(stream) == [Delta(0, " the cat", [THE, CAT], num_tokens=2)]
    bench.arrive([(1, WORLD)], {1: "length"})
    assert await anext(stream) == [Delta(0, " world", [WORLD], finish_reason="length", num_tokens=3)]
    assert stream.finished and await rest(stream) == []
    assert bench.sent == []


@in_loop
async def test_a_waiting_consumer_wakes_for_each_message(bench: Bench) -> None:
    stream = bench.submit()
    for token, text in ((THE, " the"), (CAT, " cat")):
        turn = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        assert not turn.done()
        bench.arrive([(1, token)])
        assert (await turn)[0].text == text


@in_loop
async def test_several_tokens_of_a_sequence_in_one_message_keep_their_order(bench: Bench) -> None:
    stream = bench.submit()
    other = bench.submit()
    bench.arrive([(1, THE), (2, WORLD), (1, CAT)], {1: "length", 2: "length"})
    assert (await rest(stream))[0].text == " the cat"
    assert (await rest(other))[0].text == " world"


@in_loop
async def test_children_come_in_deltas_of_their_own_and_the_stream_ends_with_the_last(bench: Bench) -> None:
    stream = bench.submit(n=2)
    bench.arrive([(key(1, 1), THE), (key(1, 0), CAT)], {key(1, 1): "length"})
    first = await anext(stream)
    assert [(d.index, d.text, d.finish_reason) for d in first] == [(0, " cat", None), (1, " the", "length")]
    bench.arrive([(key(1, 0), WORLD)], {key(1, 0): "length"})
    assert [(d.index, d.text, d.finish_reason) for d in await rest(stream)] == [(0, " world", "length")]


@in_loop
async def test_collecting_gives_one_delta_a_child(bench: Bench) -> None:
    stream = bench.submit(n=2)
    task = asyncio.create_task(stream.collect())
    for token in (THE, CAT):
        await asyncio.sleep(0)
        bench.arrive([(key(1, 0), token), (key(1, 1), WORLD)])
    bench.arrive([(key(1, 0), BANG)], {key(1, 0): "length"})
    await asyncio.sleep(0)
    assert not task.done()
    bench.arrive([(key(1, 1), BANG)], {key(1, 1): "stop"})
    assert [d.text for d in await task] == [" the cat!", " world world!"]


@in_loop
async def test_a_child_that_ends_without_a_token_is_reported(bench: Bench) -> None:
    stream = bench.submit()
    bench.arrive([], {1: "error"})
    assert await rest(stream) == [Delta(0, "", [], finish_reason="error")]


@in_loop
async def test_a_stop_string_ends_the_sequence_and_tells_the_core(bench: Bench) -> None:
    stream = bench.submit(stop=["t, w"])
    for token in (THE, CAT, COMMA, WORLD):
        assert bench.sent == []
        bench.arrive([(1, token)])
    assert bench.sent == [Finish(1, key(1))]
    bench.arrive([(1, BANG)], {1: "length"})  # was on its way already
    (delta,) = await rest(stream)
    assert delta == Delta(0, " the ca", [THE, CAT, COMMA, WORLD], None, "stop", "t, w", 4)


@in_loop
async def test_tokens_behind_a_stop_string_in_the_same_message_are_dropped(bench: Bench) -> None:
    stream = bench.submit(stop=["cat"], logprobs=0)
    bench.arrive([(1, THE)], logprobs=[row(-1)])
    assert [d.text for d in await anext(stream)] == [" the"]
    bench.arrive([(1, CAT), (1, WORLD), (1, BANG)], logprobs=[row(-2), row(-3), row(-4)])
    (delta,) = await rest(stream)
    assert (delta.text, delta.token_ids, delta.num_tokens) == (" ", [CAT], 2)
    assert [[p.logprob for p in d.values()] for d in delta.logprobs or []] == [[-2.0]]
    assert bench.sent == [Finish(1, key(1))]


@in_loop
async def test_a_stop_string_in_the_last_token_needs_no_word_to_the_core(bench: Bench) -> None:
    stream = bench.submit(stop=["cat"])
    bench.arrive([(1, CAT)], {1: "length"})
    (delta,) = await rest(stream)
    assert (delta.text, delta.finish_reason, delta.stop_reason, bench.sent) == (" ", "stop", "cat", [])


@in_loop
async def test_a_sequence_may_end_while_text_is_held_back(bench: Bench) -> None:
    stream = bench.submit(stop=["catalogue"])
    bench.arrive([(1, CAT)])
    assert [d.text for d in await anext(stream)] == [" "]
    bench.arrive([(1, EOS)], {1: "stop"}, stops={1: EOS})
    assert [(d.text, d.token_ids, d.stop_reason) for d in await rest(stream)] == [("cat", [EOS], None)]


@pytest.mark.parametrize(
    ("params", "token", "text", "stop_reason"),
    [
        ({}, EOS, " the", None),
        ({"skip_special_tokens": False}, EOS, " the", None),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, EOS, " the</s>", None),
        ({"stop_token_ids": [CAT]}, CAT, " the", CAT),
        ({"stop_token_ids": [CAT], "include_stop_str_in_output": True}, CAT, " the cat", CAT),
        ({"stop_token_ids": [EOS], "ignore_eos": True}, EOS, " the", EOS),
    ],
)
@in_loop
async def test_a_stop_token_belongs_to_the_ids_and_not_to_the_text(
    bench: Bench, params: dict, token: int, text: str, stop_reason: int | None
) -> None:
    stream = bench.submit(**params)
    bench.arrive([(1, THE)])
    bench.arrive([(1, token)], {1: "stop"}, stops={1: token})
    assert await rest(stream) == [Delta(0, text, [THE, token], None, "stop", stop_reason, 2)]


@in_loop
async def test_without_detokenizing_there_are_ids_and_no_text(bench: Bench) -> None:
    stream = bench.submit(detokenize=False)
    bench.arrive([(1, THE)], {1: "length"})
    assert await rest(stream) == [Delta(0, "", [THE], None, "length", None, 1)]


# ------------------------------------------------------------------------------------------------------------- logprobs
def row(logprob: float, rank: int = 1, top: dict[int, float] | None = None) -> TokenLogprobs:
    ids, values = np.array(list(top or {}), "<i4"), np.array(list((top or {}).values()), "<f4")
    return TokenLogprobs(logprob, rank, ids.tobytes(), values.tobytes())


@in_loop
async def test_logprobs_have_vllms_shape(bench: Bench) -> None:
    stream = bench.submit(logprobs=2)
    bench.arrive([(1, THE)], logprobs=[row(-3.0, 7, {CAT: -0.5, WORLD: -1.0})])
    bench.arrive([(1, CAT)], {1: "length"}, logprobs=[row(-0.5, 1, {CAT: -0.5, THE: -2.0})])
    (delta,) = await rest(stream)
    assert list(delta.logprobs) == [
        {THE: Logprob(-3.0, 7, " the"), CAT: Logprob(-0.5, 1, " cat"), WORLD: Logprob(-1.0, 2, " world")},
        {CAT: Logprob(-0.5, 1, " cat"), THE: Logprob(-2.0, 2, " the")},
    ]


@in_loop
async def test_logprobs_of_requests_that_we_dropped_are_skipped(bench: Bench) -> None:
    dropped, stopped, kept, plain = (bench.submit(logprobs=0), bench.submit(logprobs=0, stop=["cat"]), bench.submit(logprobs=0),
                                     bench.submit())  # fmt: skip
    bench.arrive([(2, CAT)], logprobs=[row(-9.0)])
    dropped.cancel()
    bench.arrive([(1, THE), (2, THE), (4, THE), (3, THE)], logprobs=[row(-1.0), row(-2.0), row(-3.0)])
    assert [list(d.logprobs) for d in await anext(kept)] == [[{THE: Logprob(-3.0, 1, " the")}]]
    assert (await anext(plain))[0].logprobs is None
    assert stopped.finished


@in_loop
async def test_fewer_logprobs_than_tokens_that_want_them_fail_all_and_free_the_core(bench: Bench) -> None:
    streams = [bench.submit(logprobs=0), bench.submit()]
    bench.arrive([(2, THE), (1, THE)])
    for stream in streams:
        with pytest.raises(EngineError):
            await rest(stream)
    assert bench.sent == [Abort(1, [1, 2])]


@in_loop
async def test_prompt_logprobs_come_together_from_their_chunks(bench: Bench) -> None:
    stream = bench.submit([THE, CAT, WORLD], prompt_logprobs=1)
    for start, own, top in ((1, -1.0, CAT), (2, -2.0, THE)):
        ranks, values = np.array([start], "<i4"), np.array([own], "<f4")
        tops = (np.array([top], "<i4").tobytes(), np.array([-0.5], "<f4").tobytes())
        message = PromptLogprobs(1, 1, start, 1, values.tobytes(), ranks.tobytes(), *tops)
        bench.dispatcher.prompt_logprobs(message)
    assert list(stream.prompt_logprobs) == [
        None,
        {CAT: Logprob(-1.0, 1, " cat")},
        {WORLD: Logprob(-2.0, 2, " world"), THE: Logprob(-0.5, 1, " the")},
    ]
    assert bench.submit().prompt_logprobs is None


@in_loop
async def test_rows_of_a_prompt_that_was_preempted_come_in_other_chunks(bench: Bench) -> None:
    stream = bench.submit([THE, CAT, WORLD, CAT, THE, CAT], prompt_logprobs=0)

    def chunk(start: int, rows: int) -> None:
        values, ranks = np.full(rows, -float(rows), "<f4"), np.ones(rows, "<i4")
        bench.dispatcher.prompt_logprobs(PromptLogprobs(1, 1, start, 0, values.tobytes(), ranks.tobytes(), b"", b""))

    for start, rows in ((1, 2), (3, 1), (1, 1), (2, 4)):  # preempted after two chunks
        chunk(start, rows)
    assert [row and next(iter(row.values())).logprob for row in stream.prompt_logprobs] == [None, -1, -4, -4, -4, -4]


# ------------------------------------------------------------------------------------------------------------------ ends
@in_loop
async def test_cancelling_aborts_once_and_ends_the_stream_with_what_was_held_back(bench: Bench) -> None:
    stream = bench.submit(n=2, stop=["cats"])
    bench.arrive([(key(1, 0), CAT), (key(1, 1), THE)], {key(1, 1): "length"})
    stream.cancel()
    stream.cancel()
    assert bench.sent == [Abort(1, [1])]
    assert [(d.index, d.text, d.finish_reason) for d in await rest(stream)] == [(0, " cat", "abort"), (1, " the", "length")]
    bench.arrive([(key(1, 0), WORLD)])
    assert await rest(stream) == []


@in_loop
async def test_cancelling_wakes_a_waiting_consumer_and_nothing_happens_after_the_end(bench: Bench) -> None:
    stream, ended = bench.submit(), bench.submit()
    bench.arrive([(2, THE)], {2: "length"})
    ended.cancel()
    turn = asyncio.create_task(rest(stream))
    await asyncio.sleep(0)
    stream.cancel()
    assert [d.finish_reason for d in await turn] == ["abort"]
    assert bench.sent == [Abort(1, [1])]


@in_loop
async def test_a_dropped_stream_is_aborted_unless_it_has_ended(bench: Bench) -> None:
    stream, ended = bench.submit(), bench.submit()
    bench.arrive([(2, THE)], {2: "length"})
    del stream, ended
    gc.collect()
    await asyncio.sleep(0)
    assert bench.sent == [Abort(1, [1])]
    bench.dispatcher.check()


@in_loop
async def test_an_error_is_raised_after_what_had_arrived(bench: Bench) -> None:
    streams = [bench.submit(), bench.submit()]
    bench.arrive([(1, THE)])
    bench.dispatcher.fail_all(EngineDown("gone"))
    assert [d.text for d in await anext(streams[0])] == [" the"]
    for stream in streams:
        with pytest.raises(EngineDown, match="gone"):
            await anext(stream)
        with pytest.raises(ClientError):
            await stream.collect()
        assert stream.finished
    assert bench.sent == []


@in_loop
async def test_a_refused_request_raises_in_a_consumer_that_waits_for_the_end(bench: Bench) -> None:
    stream = bench.submit()
    task = asyncio.create_task(stream.collect())
    await asyncio.sleep(0)
    bench.dispatcher.fail(1, EngineError("no"))
    with pytest.raises(EngineError):
        await task
    stream.cancel()
    assert bench.sent == []


@in_loop
async def test_a_cancelled_consumer_may_be_followed_by_another(bench: Bench) -> None:
    stream = bench.submit()
    turn = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    turn.cancel()
    await asyncio.wait([turn])
    bench.arrive([(1, THE)], {1: "length"})
    assert [d.text for d in await rest(stream)] == [" the"]


@in_loop
async def test_the_first_token_brings_its_times_and_the_cached_tokens(bench: Bench) -> None:
    stream = bench.submit(n=2)
    assert (stream.num_cached_tokens, stream.metrics.first_token_time) == (None, None)
    bench.arrive([(key(1, 0), THE)], started=[Started(key(1, 0), 16, 0.25)])
    bench.arrive([(key(1, 1), THE)], started=[Started(key(1, 1), 17, 0.5)])
    assert (stream.num_cached_tokens, stream.metrics.queue_s) == (16, 0.25)
    assert stream.metrics.first_token_time is not None and stream.metrics.finished_time is None


@in_loop
async def test_drafts_are_counted_by_step_and_request(bench: Bench) -> None:
    streams = bench.submit(), bench.submit()
    bench.arrive([(1, THE), (2, THE), (2, CAT)], drafts=np.array([[key(2), 5, 1], [key(9), 1, 1]]).tobytes())
    bench.arrive([(1, THE), (2, CAT)], {1: "length"}, drafts=np.array([[key(1), 2, 0], [key(2), 3, 0]]).tobytes())
    bench.arrive([(2, CAT)], {2: "length"}, drafts=np.array([[key(1), 4, 4]]).tobytes())  # a request that has ended
    assert [stream.metrics.drafts for stream in streams] == [[(2, 0)], [(5, 1), (3, 0)]]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_interleaving_gives_each_sequence_its_own_text(data: st.DataObject) -> None:
    """Two requests of two children; messages, turns of consumers and ends in any order."""
    texts = {
        key(r, c): data.draw(st.text(st.sampled_from("ab é漢😀"), min_size=1, max_size=12)) for r in (1, 2) for c in (0, 1)
    }
    todo = {k: TOKENIZER.encode(text) for k, text in texts.items()}

    async def run() -> None:
        bench = Bench()
        streams = [bench.submit(n=2, stop=["zz"] if data.draw(st.booleans()) else None) for _ in range(2)]
        got = dict.fromkeys(texts, "")
        while todo:
            chosen = data.draw(st.lists(st.sampled_from(sorted(todo)), min_size=1, max_size=4))
            tokens = [(k, todo[k].pop(0)) for k in chosen if todo[k]]
            ends = {k: "length" for k in list(todo) if not todo[k]}
            for k in ends:
                del todo[k]
            bench.arrive(tokens, ends)
            for r, stream in enumerate(streams, 1):
                if data.draw(st.booleans()) and stream._state.news:
                    for delta in await anext(stream):
                        got[key(r, delta.index)] += delta.text
        for r, stream in enumerate(streams, 1):
            for delta in await rest(stream):
                got[key(r, delta.index)] += delta.text
        assert got == texts
        assert not bench.dispatcher.requests

    asyncio.run(run())


def test_a_delta_can_go_over_a_wire() -> None:
    delta = Delta(0, "x", [1], [{1: Logprob(-1.0, 1, "x")}], "stop", "x", 1)
    assert msgspec.json.decode(msgspec.json.encode(delta), type=Delta) == delta

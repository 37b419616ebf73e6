"""Stream.follow: a sink is given what arrives at once; ends, failures and its own mistakes are its follower's."""

import asyncio

import pytest
from stream_bench import CAT, COMMA, THE, WORLD, Bench, in_loop, rest

from quire.frontend.client.outputs import Delta
from quire.frontend.client.stream import EngineError, Stream


def followed(stream: Stream, most: int = 1 << 30) -> tuple[asyncio.Task[None], list[Delta]]:
    """A task that follows the stream, and what its sink was given: `most` Deltas at most."""
    got: list[Delta] = []

    def sink(delta: Delta) -> bool:
        got.append(delta)
        return len(got) < most

    return asyncio.create_task(stream.follow(sink)), got


@in_loop
async def test_a_sink_is_given_what_arrives_at_once_and_the_end_is_the_iterations(bench: Bench) -> None:
    stream = bench.submit()
    bench.arrive([(1, THE)])
    assert [d.text for d in await anext(stream)] == [" the"]
    task, got = followed(stream)
    await asyncio.sleep(0)
    bench.arrive([(1, CAT), (1, COMMA)])
    bench.arrive([(1, THE)])
    assert [(d.token_ids, d.text) for d in got] == [([CAT, COMMA], " cat,"), ([THE], " the")]  # nobody had to wake up
    bench.arrive([(1, WORLD)], {1: "length"})
    await task
    assert len(got) == 2
    [last] = await rest(stream)
    assert (last.text, last.finish_reason, last.num_tokens) == (" world", "length", 5)


@in_loop
async def test_what_a_sink_no_longer_wants_waits_for_the_iteration(bench: Bench) -> None:
    stream = bench.submit()
    task, got = followed(stream, most=1)
    await asyncio.sleep(0)
    bench.arrive([(1, THE)])
    bench.arrive([(1, CAT)])
    await task
    bench.arrive([(1, COMMA)])
    assert [d.text for d in got] == [" the"] and [d.text for d in await anext(stream)] == [" cat,"]
    bench.arrive([(1, THE)])
    await asyncio.wait_for(stream.follow(lambda delta: True), 10)  # there is something to take: not for a sink
    assert [d.text for d in await anext(stream)] == [" the"]


@in_loop
async def test_what_a_sink_raises_is_its_followers_and_nobody_elses(bench: Bench) -> None:
    bad, good = bench.submit(), bench.submit()
    task = asyncio.create_task(bad.follow(lambda delta: 1 // 0 > 0))
    other, got = followed(good)
    await asyncio.sleep(0)
    bench.arrive([(1, THE), (2, CAT)])
    assert [d.text for d in got] == [" cat"]
    with pytest.raises(ZeroDivisionError):
        await task
    bench.arrive([(1, THE), (2, CAT)])
    assert len(got) == 2 and [d.text for d in await anext(bad)] == [" the"]
    other.cancel()
    await asyncio.wait((other,))
    bench.arrive([(2, THE)])
    assert len(got) == 2 and [d.text for d in await anext(good)] == [" the"]  # a sink goes with its follower


@pytest.mark.parametrize("how", ["cancelled", "failed", "stopped", "ended"])
@in_loop
async def test_followers_learn_of_every_end(bench: Bench, how: str) -> None:
    stream = bench.submit(stop=[", the"])
    task, got = followed(stream)
    await asyncio.sleep(0)
    bench.arrive([(1, CAT)])
    match how:
        case "cancelled":
            stream.cancel()
        case "failed":
            bench.dispatcher.fail(1, EngineError("broken"))
        case "stopped":
            bench.arrive([(1, COMMA), (1, THE)])
        case "ended":
            bench.arrive([], {1: "stop"})
    await task
    if how == "failed":
        with pytest.raises(EngineError, match="broken"):
            await rest(stream)
    else:
        deltas = await rest(stream)
        assert deltas[-1].finish_reason == ("abort" if how == "cancelled" else "stop")
        assert "".join(d.text for d in got + deltas) == " cat"
    assert stream.finished

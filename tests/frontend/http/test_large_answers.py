"""Answers of any size: in pieces, equal to what one piece would be, bounded, and never keeping the loop from others."""

import asyncio
import dataclasses
import json
import time

import fake_client as http
import msgspec
import numpy as np
import pytest
from fake_client import CHAT, COMPLETIONS, HELLO
from hypothesis import given
from hypothesis import strategies as st
from loop_gap import MOST_S, LoopGap
from replayed import Replayed

from quire.frontend.client.outputs import Delta
from quire.frontend.client.stream import MOST_ROWS, RequestState, Stream
from quire.frontend.http.api import generate
from quire.frontend.http.api.bodies.json_pieces import JsonPieces, in_list, pieces
from quire.frontend.http.api.sse import json_bytes
from quire.ipc.sampling import SamplingParams


class Inner(msgspec.Struct):
    name: str
    values: list[int]
    left_out: int | msgspec.UnsetType = msgspec.UNSET


class Outer(msgspec.Struct):
    title: str | None
    inner: list[Inner]
    table: dict[str, float]
    empty: list[int] = []


class Renamed(msgspec.Struct, rename="camel", omit_defaults=True):
    some_name: int = 0
    other_name: int = 1


inners = st.builds(Inner, st.text(), st.lists(st.integers(0, 9)))
outers = st.builds(Outer, st.none() | st.text(), st.lists(inners, max_size=4), st.dictionaries(st.text(), st.floats(0, 1)))


@given(outers)
def test_pieces_are_what_one_piece_would_be(value):
    assert b"".join(pieces(value)) == json_bytes(value)


@given(st.lists(st.lists(st.integers(), max_size=3), max_size=5))
def test_a_list_in_parts_is_the_list(parts):
    assert b"".join(in_list(parts)) == json_bytes([item for part in parts for item in part])


def test_long_lists_and_structs_that_are_encoded_otherwise():
    for value in (Inner("a", list(range(10_000))), Renamed(5), [Renamed(), Renamed(3, 4)], Inner("b", [], 3)):
        assert b"".join(pieces(value)) == json_bytes(value)
    lazy = JsonPieces(lambda: iter([b"[1,", b"2]"]))
    outer = Outer("t", [], {})
    outer.empty = lazy
    for _ in range(2):
        assert json.loads(b"".join(pieces(outer)))["empty"] == [1, 2]


def body_of(path: str, n: int, num_tokens: int) -> dict:
    if path == CHAT:
        return {**HELLO, "n": n, "logprobs": True, "top_logprobs": 20, "max_completion_tokens": num_tokens}
    return {"prompt": "abc", "n": n, "logprobs": 20, "echo": True, "max_tokens": num_tokens}


def test_the_meter_sees_what_holds_the_loop():
    async def main():
        async with LoopGap() as gap:
            for _ in range(10):
                gap.looked.clear()
                await gap.looked.wait()
        quiet = gap.worst_s
        async with LoopGap() as gap:
            until = time.thread_time() + 1.2 * MOST_S
            while time.thread_time() < until:
                pass
        assert quiet < MOST_S < gap.worst_s

    asyncio.run(main())


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_large_answer_is_whole_and_keeps_nobody_waiting(path):
    async def main():
        api = http.Api(Replayed(200))
        wire = api.wire()
        async with LoopGap() as gap:
            wire.feed(api.encode("POST", path, body_of(path, 32, 200)))
            while wire.connection._task is not None:
                await asyncio.wait([wire.connection._task])
        (answer,) = wire.answers()
        assert answer.status == 200 and answer.complete and int(answer.headers["content-length"]) > 1 << 20
        assert wire.transport.num_writes > 10 and gap.worst_s < MOST_S
        choices = json.loads(answer.body)["choices"]
        assert [c["index"] for c in choices] == list(range(32))
        if path == CHAT:
            assert {len(c["logprobs"]["content"]) for c in choices} == {200}
            assert len(choices[3]["logprobs"]["content"][7]["top_logprobs"]) == 20
        else:
            assert {len(column) for c in choices for column in c["logprobs"].values()} == {203}
            offsets, text = choices[0]["logprobs"]["text_offset"], choices[0]["text"]
            assert offsets == sorted(offsets) and offsets[:4] == [0, 1, 2, 3] and 0 < len(text) - offsets[-1] <= 2

    asyncio.run(main())


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_an_answer_beyond_the_limit_is_refused(path):
    async def main():
        api = http.Api(Replayed(100))
        api.app._services = dataclasses.replace(api.app._services, max_response_bytes=1 << 19)
        answer = await api.ask("POST", path, body_of(path, 32, 100))
        assert answer.status == 400 and json.loads(answer.body)["error"]["code"] == "response_too_large"
        assert (await api.ask("POST", path, body_of(path, 1, 100))).status == 200

    asyncio.run(main())


def test_what_will_be_too_long_is_ended_before_it_is(monkeypatch):
    monkeypatch.setattr(generate, "_LOOK_S", 0.001)

    class Endless(Replayed):
        def submit(self, prompt_token_ids, params, **options):
            state = RequestState(1, "", np.array(prompt_token_ids, np.int32), params, self.tokenizer, 0.0)
            state.sequences[0].ids = [100] * 20_000
            self.streams.append(Stream(state, lambda _: state.abort()))
            return self.streams[-1]

    async def main():
        client = Endless(0)
        api = http.Api(client)
        api.app._services = dataclasses.replace(api.app._services, max_response_bytes=1 << 19)
        answer = await api.ask("POST", CHAT, body_of(CHAT, 1, 1 << 19))
        assert answer.status == 400 and json.loads(answer.body)["error"]["code"] == "response_too_large"
        assert client.streams[0].finished

    asyncio.run(main())


def test_a_client_that_leaves_amid_a_large_answer():
    async def main():
        api = http.Api(Replayed(100))
        wire = api.wire()
        wire.feed(api.encode("POST", CHAT, body_of(CHAT, 32, 100)))
        await wire.transport.written.wait()
        wire.connection.pause_writing()  # it reads no more
        task = wire.connection._task
        wire.connection.connection_lost(None)
        await asyncio.wait([task])
        assert wire.connection._task is None and len(wire.transport.sent) < 1 << 20

    asyncio.run(main())


def test_prompt_logprobs_of_a_long_prompt():
    async def main():
        api = http.Api(Replayed(2))
        wire = api.wire()
        prompt = [5 + i % 90 for i in range(3000)]
        async with LoopGap() as gap:
            wire.feed(api.encode("POST", COMPLETIONS, {"prompt": prompt, "prompt_logprobs": 20, "max_tokens": 2}))
            while wire.connection._task is not None:
                await asyncio.wait([wire.connection._task])
        (answer,) = wire.answers()
        rows = json.loads(answer.body)["choices"][0]["prompt_logprobs"]
        assert rows[0] is None and len(rows) == 3000
        assert all(str(token) in row for token, row in zip(prompt[1:], rows[1:], strict=True))
        assert gap.worst_s < MOST_S

    asyncio.run(main())


def test_a_stream_that_is_far_behind_goes_on_in_slices():
    async def main():
        client = Replayed(1000)
        stream = client.submit([1, 2], SamplingParams(n=3, logprobs=2, max_tokens=1000))
        turns = [deltas async for deltas in stream]
        assert all(sum(len(d.token_ids) for d in deltas) <= MOST_ROWS for deltas in turns) and len(turns) > 3000 // MOST_ROWS
        merged = [Delta(i, "", [], []) for i in range(3)]
        for delta in (d for deltas in turns for d in deltas):
            merged[delta.index].text += delta.text
            merged[delta.index].token_ids += delta.token_ids
            assert len(delta.logprobs) == len(delta.token_ids)
            merged[delta.index].logprobs += delta.logprobs
            merged[delta.index].finish_reason = delta.finish_reason
            merged[delta.index].num_tokens = delta.num_tokens
        whole = await client.submit([1, 2], SamplingParams(n=3, logprobs=2, max_tokens=1000)).collect()
        assert merged == [msgspec.structs.replace(d, logprobs=list(d.logprobs)) for d in whole]

    asyncio.run(main())


def test_the_prompt_goes_before_a_stream_in_pieces_that_no_other_event_breaks():
    async def main():
        api = http.Api(Replayed(3))
        prompts = [[5 + i % 90 for i in range(5000)], [7] * 5000]
        body = {"prompt": prompts, "echo": True, "n": 2, "max_tokens": 3, "return_token_ids": True, "logprobs": 1}
        events = await api.events(COMPLETIONS, body)
        opening = {c["index"]: c for e in events[:-1] for c in e["choices"] if c.get("prompt_token_ids")}
        assert [opening[i]["prompt_token_ids"] == prompts[i // 2] for i in range(4)] == [True] * 4
        assert {len(c["logprobs"]["tokens"]) for c in opening.values()} == {5000}

    asyncio.run(main())

"""`pool`: the prompts of a body as requests of up to 128 prompts; a bounded number is on its way, and an error ends all."""

import asyncio
import base64
import json
import types

import msgspec
import numpy as np
import pytest
from fake_client import Api, FakeClient
from loop_gap import MOST_S, LoopGap

from quire.frontend.client import pooling
from quire.frontend.client.pooling import MOST_AT_ONCE, PooledState, pool
from quire.frontend.client.scoring import score_pairs
from quire.frontend.client.stream import Overloaded
from quire.frontend.http.api.bodies.json_pieces import pieces
from quire.frontend.http.api.pooling.vectors import AT_ONCE, VectorFormat, numbers, sparse_json
from quire.frontend.http.api.sse import json_bytes
from quire.ipc.messages.frontend import EngineLimits
from quire.ipc.pooling import MAX_INPUTS, PoolingInfo, PoolingParams


class Engine:
    """A client; the test answers its requests."""

    def __init__(self) -> None:
        self.welcome = types.SimpleNamespace(limits=EngineLimits(16, 100, 4, 20, pooling=PoolingInfo(["embed"], "LAST")))
        self.states: list[PooledState] = []
        self.prompts: list[int] = []  # the first id of each
        self.cancelled = 0
        self._submitted = asyncio.Event()

    async def has_requests(self, count: int) -> None:
        while len(self.states) < count:
            self._submitted.clear()
            await self._submitted.wait()

    def hold(self) -> None:
        pass

    def submit_pool(self, prompts, params, **more) -> PooledState:
        self.states.append(PooledState(len(self.states), "", [len(prompt) for prompt in prompts], 0.0))
        self.prompts += [prompt[0] for prompt in prompts]
        self._submitted.set()
        return self.states[-1]

    def cancel_pool(self, state: PooledState) -> None:
        self.cancelled += 1
        state.abort()

    def answer(self, state: PooledState) -> None:
        first = MAX_INPUTS * state.id
        for child in range(state.num_open):
            state.take(child, np.array([first + child], np.float32), 0, True, 0)

    @property
    def open(self) -> list[PooledState]:
        return [state for state in self.states if state.num_open]


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_a_large_body_has_a_bounded_number_of_requests_on_their_way():
    async def main() -> None:
        engine, count = Engine(), MAX_INPUTS * MOST_AT_ONCE + 3 * MAX_INPUTS + 1
        task = asyncio.create_task(pool(engine, [[i] for i in range(count)], PoolingParams()))
        await engine.has_requests(MOST_AT_ONCE)
        await turns()
        assert len(engine.open) == len(engine.states) == MOST_AT_ONCE
        engine.answer(engine.states[5])  # whichever has ended makes room
        await turns()
        assert len(engine.states) == MOST_AT_ONCE + 1
        while not task.done():
            for state in engine.open:
                engine.answer(state)
            await turns()
            assert len(engine.open) <= MOST_AT_ONCE
        assert engine.prompts == list(range(count)) and engine.cancelled == 0
        assert [int(row[0]) for row in task.result().data] == list(range(count))

    asyncio.run(main())


@pytest.mark.parametrize("num_prompts", [3 * MAX_INPUTS, MAX_INPUTS * (MOST_AT_ONCE + 2), MAX_INPUTS])
def test_the_first_error_ends_all_requests_of_a_body(num_prompts):
    """Also one of the last request, while the first ones still wait."""

    async def main() -> None:
        engine = Engine()
        task = asyncio.create_task(pool(engine, [[i] for i in range(num_prompts)], PoolingParams()))
        await engine.has_requests(min(num_prompts // MAX_INPUTS, MOST_AT_ONCE))
        await turns()
        for state in engine.states[-2:]:
            state.fail(Overloaded("full"))
        with pytest.raises(Overloaded):
            await asyncio.wait_for(task, 60)
        assert not engine.open and engine.cancelled == len(engine.states) - len(engine.states[-2:])
        assert len(engine.states) <= MOST_AT_ONCE

    asyncio.run(main())


def test_a_body_that_is_not_wanted_any_more_leaves_nothing_running():
    async def main() -> None:
        engine = Engine()
        task = asyncio.create_task(pool(engine, [[i] for i in range(10_000)], PoolingParams()))
        await engine.has_requests(MOST_AT_ONCE)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not engine.open and engine.cancelled == MOST_AT_ONCE

    asyncio.run(main())


def test_numbers_are_written_row_by_row_as_json_has_them():
    rows = np.random.default_rng(3).normal(size=(3, 4)).astype(np.float32)
    for data in (rows, rows[0], rows[:0], rows[:, :0], rows.astype(np.int8)):
        assert json.loads(json_bytes([numbers(data)])) == [data.tolist()]


def test_long_results_are_written_in_pieces():
    rows = np.random.default_rng(3).normal(size=(3, AT_ONCE // 2 + 5)).astype(np.float32)
    weights = np.stack([np.random.default_rng(4).permutation(AT_ONCE), np.arange(AT_ONCE)], 1).astype(np.float32)
    sparse = [{"index": int(token), "value": weight} for token, weight in sorted(weights.tolist())]
    halves = VectorFormat("base64", "float16", "big")
    for value, expected in (
        (numbers(rows), rows.tolist()),
        (numbers(rows.reshape(-1)), rows.reshape(-1).tolist()),
        (sparse_json(weights), sparse),
        (halves.json(rows), base64.b64encode(rows.astype(">f2").tobytes()).decode()),
        ({"embed": numbers(rows), "embed_sparse": sparse_json(weights[:2])}, {"embed": rows.tolist(), "embed_sparse": None}),
    ):
        parts = list(pieces(value))
        found = json.loads(b"".join(parts))
        if isinstance(found, dict):
            expected["embed_sparse"] = found["embed_sparse"]
        assert found == expected and max(map(len, parts)) < 24 * AT_ONCE


class Vectors(FakeClient):
    """An engine that answers at once: each token's vector has 128 elements."""

    def __init__(self) -> None:
        super().__init__()
        limits = EngineLimits(4096, 300, 8, 20, pooling=PoolingInfo(["token_embed"], "CLS", token_size=128))
        self.welcome = msgspec.structs.replace(self.welcome, limits=limits)

    def hold(self) -> None:
        pass

    def submit_pool(self, prompts, params, **more) -> PooledState:
        state = PooledState(1, "", [len(prompt) for prompt in prompts], 0.0)
        for child, prompt in enumerate(prompts):
            state.take(child, np.full((len(prompt), 128), 0.12345678, np.float32), 0, True, 0)
        return state


def test_a_large_answer_keeps_no_one_waiting():
    """40 MB: encoded and sent as a whole, they held the loop for 0.1 s."""

    async def main() -> None:
        wire = Api(Vectors()).wire()
        sent = wire.transport.sent
        async with LoopGap() as gap:
            wire.feed(Api.encode("POST", "/embed_all", {"inputs": ["a" * 500] * 30}))
            while not sent.endswith(b"\r\n0\r\n\r\n"):
                wire.transport.written.clear()
                await wire.transport.written.wait()
        assert sent.startswith(b"HTTP/1.1 200 ") and wire.transport.num_writes > 100
        assert sent.count(b"0.12345678") == 30 * 500 * 128 and gap.worst_s < MOST_S

    asyncio.run(main())


def test_the_bound_is_below_what_a_queue_holds():
    from quire.ipc.config import EngineConfig

    assert EngineConfig().max_num_waiting // 2 >= pooling.MOST_AT_ONCE * MAX_INPUTS


@pytest.mark.parametrize(("name", "expected"), [("euclidean", [-5.0, 0.0]), ("manhattan", [-7.0, 0.0]), ("dot", [12.0, 25.0])])
def test_texts_are_compared_as_the_checkpoint_says(name, expected):
    """By vectors that are not normalized."""
    by_length = {1: [0, 0], 2: [4, 3], 3: [0, 4]}

    async def main() -> None:
        client = Vectors()
        info = PoolingInfo(["embed"], "MEAN", embedding_size=2, similarity_fn_name=name)
        client.welcome = msgspec.structs.replace(client.welcome, limits=EngineLimits(64, 300, 8, 20, pooling=info))

        def submit_pool(prompts, params, **more) -> PooledState:
            assert params.use_activation is None
            state = PooledState(1, "", [len(prompt) for prompt in prompts], 0.0)
            for child, prompt in enumerate(prompts):
                state.take(child, np.array(by_length[len(prompt)], np.float32), 0, True, 0)
            return state

        client.submit_pool = submit_pool
        other = "bbb" if name == "dot" else "a"
        assert (await score_pairs(client, [("aa", other), ("aa", "aa")])).scores.tolist() == expected

    asyncio.run(main())

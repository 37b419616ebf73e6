"""`pool`: the prompts of a body as requests of up to 128 prompts; a bounded number is on its way, and an error ends all."""

import asyncio
import json
import types

import numpy as np
import pytest

from quire.frontend.client import pooling
from quire.frontend.client.pooling import MOST_AT_ONCE, PooledState, pool
from quire.frontend.client.stream import Overloaded
from quire.frontend.http.api.pooling.vectors import numbers
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


def test_the_bound_is_below_what_a_queue_holds():
    from quire.ipc.config import EngineConfig

    assert EngineConfig().max_num_waiting // 2 >= pooling.MOST_AT_ONCE * MAX_INPUTS

"""AsyncClient against a core in a thread: requests and answers over the wire, refusals before it, and a core that goes."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest
import toy_tokenizers
from fake_core import LIMITS, FakeCore, echo, outputs, prompt_of
from own_loop import heard, in_own_loop, until

from quire.frontend.client import async_client as client_module
from quire.frontend.client.async_client import AsyncClient
from quire.frontend.client.outputs import RequestOutput
from quire.frontend.client.stream import (
    DeadlineExceeded,
    EngineDown,
    EngineError,
    InvalidRequest,
    Overloaded,
    RateLimited,
    TooLong,
)
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.links.frontend_to_core import FrontendToCore
from quire.ipc.messages.frontend import Abort, AddRequest, EngineLimits, Finish, RequestError
from quire.ipc.sampling import SamplingParams

TOKENIZER = Tokenizer.from_files(toy_tokenizers.files())
THE, CAT, WORLD = (TOKENIZER.encode(t)[0] for t in (" the", " cat", " world"))
ENDLESS = SamplingParams(max_tokens=None)


def with_core(**options: Any) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Run the test in a loop of its own with a FakeCore and a connected client."""

    def decorate(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        async def run(**kwargs: Any) -> None:
            with FakeCore(**options) as core:
                async with AsyncClient(core.address) as client:
                    await test(core, client, **kwargs)

        return in_own_loop(test, run)

    return decorate


async def last(generator: AsyncIterator[RequestOutput]) -> RequestOutput:
    return [output async for output in generator][-1]


# -------------------------------------------------------------------------------------------------------- generating
@with_core(script=echo)
async def test_generate_streams_cumulative_outputs_of_a_text(core: FakeCore, client: AsyncClient) -> None:
    texts = []
    async for output in client.generate(" the cat", SamplingParams(max_tokens=6), "mine"):
        texts.append(output.outputs[0].text)
        assert (output.request_id, output.prompt, output.prompt_token_ids) == ("mine", " the cat", [THE, CAT])
        assert len(output.outputs[0].token_ids) == len(texts[-1].split())
    assert texts[-1] == " the cat the cat the cat" and all(texts[-1].startswith(t) for t in texts)
    assert output.finished and output.outputs[0].finish_reason == "length" and output.num_cached_tokens == 0
    assert output.metrics is not None and output.metrics.finished_time is not None
    assert client.num_requests == 0


@with_core(script=echo)
async def test_outputs_already_handed_out_do_not_change(core: FakeCore, client: AsyncClient) -> None:
    seen = [o async for o in client.generate([THE], SamplingParams(max_tokens=20))]
    assert [len(o.outputs[0].token_ids) for o in seen] == sorted({len(o.outputs[0].token_ids) for o in seen})
    assert [o.finished for o in seen] == [False] * (len(seen) - 1) + [True]


@with_core(script=echo)
@pytest.mark.parametrize("prompt", [[THE, CAT], {"prompt_token_ids": [THE, CAT]}, {"prompt": " the cat"}, " the cat"])
async def test_prompts_come_in_four_shapes(core: FakeCore, client: AsyncClient, prompt: Any) -> None:
    output = await last(client.generate(prompt, SamplingParams(max_tokens=2)))
    assert output.outputs[0].text == " the cat"


@with_core(script=echo, files=toy_tokenizers.files(toy_tokenizers.llama2_like()))
async def test_chats_go_through_the_template_without_a_second_bos(core: FakeCore, client: AsyncClient) -> None:
    messages = [{"role": "user", "content": "the cat"}]
    output = await last(client.chat(messages, SamplingParams(max_tokens=1), add_generation_prompt=False))
    assert output.prompt == "<|im_start|>user\nthe cat<|im_end|>\n"
    assert output.prompt_token_ids == client.tokenizer.encode(output.prompt, add_special_tokens=False)
    assert prompt_of(await heard(core, AddRequest)) == output.prompt_token_ids
    with pytest.raises(InvalidRequest, match="role"):
        await anext(client.chat([{}]))


@with_core(script=echo, files=toy_tokenizers.files() | {"generation_config.json": b'{"temperature": 0.5, "max_new_tokens": 3}'})
async def test_without_params_the_models_defaults_are_used(core: FakeCore, client: AsyncClient) -> None:
    output = await last(client.generate(" the"))
    assert len(output.outputs[0].token_ids) == 3
    assert (await heard(core, AddRequest)).task.params.temperature == 0.5


@with_core(script=echo)
async def test_a_request_travels_with_what_belongs_to_it(core: FakeCore, client: AsyncClient) -> None:
    params = SamplingParams(max_tokens=500, min_tokens=400, bad_words=["cat"], stop=["zzz"])
    stream = client.submit([THE] * 10, params, priority=-3, cache_salt="salt", request_name="name")
    request = await heard(core, AddRequest)
    assert (request.priority, request.cache_salt, request.id) == (-3, "salt", stream.id)
    assert request.arrival_time == stream.metrics.arrival_time
    assert request.task.params.max_tokens == request.task.params.min_tokens == LIMITS.max_model_len - 10
    assert request.task.params.bad_words_token_ids == [TOKENIZER.encode("cat"), TOKENIZER.encode(" cat")]
    assert stream.params == request.task.params and stream.request_name == "name"


@with_core(script=lambda request, child: [*TOKENIZER.encode(" the cat world"), THE] * 9)
async def test_a_stop_string_frees_the_core(core: FakeCore, client: AsyncClient) -> None:
    (delta,) = await client.submit([THE], SamplingParams(max_tokens=None, stop=["cat wor"])).collect()
    assert (delta.text, delta.finish_reason, delta.stop_reason) == (" the ", "stop", "cat wor")
    request = await heard(core, AddRequest)
    assert await heard(core, Finish) == Finish(core.epoch, request.id << 8)


# ------------------------------------------------------------------------------------------------------------ aborting
@with_core()
async def test_leaving_the_loop_aborts(core: FakeCore, client: AsyncClient) -> None:
    generator = client.generate([THE], ENDLESS)
    turn = asyncio.create_task(anext(generator))
    request = await heard(core, AddRequest)
    core.say(outputs([(request.id << 8, CAT)], epoch=core.epoch))
    assert (await turn).outputs[0].text == " cat"
    await generator.aclose()
    assert (await heard(core, Abort)).ids == [request.id]
    assert client.num_requests == 0


@with_core()
async def test_a_cancelled_task_aborts(core: FakeCore, client: AsyncClient) -> None:
    async def consume() -> None:
        async for _ in client.generate([THE], ENDLESS):
            pass

    task = asyncio.create_task(consume())
    request = await heard(core, AddRequest)
    task.cancel()
    assert (await heard(core, Abort)).ids == [request.id]


@with_core()
async def test_abort_by_name_ends_the_generator_with_abort(core: FakeCore, client: AsyncClient) -> None:
    task = asyncio.create_task(last(client.generate([THE], ENDLESS, "name")))
    await heard(core, AddRequest)
    client.abort("nobody")
    client.abort("name")
    assert (await task).outputs[0].finish_reason == "abort"
    await heard(core, Abort)


# --------------------------------------------------------------------------------------------------- refused before sent
@with_core()
@pytest.mark.parametrize(
    ("prompt", "error", "match"),
    [
        ([], InvalidRequest, "empty"),
        ([-1], InvalidRequest, "outside the vocabulary of 400"),
        ([400], InvalidRequest, "outside the vocabulary of 400"),
        ([1 << 70], InvalidRequest, "token ids"),
        ([1.5], InvalidRequest, "token ids"),
        (["a"], InvalidRequest, "token ids"),
        ([True], InvalidRequest, "token ids"),
        ([[1], [2]], InvalidRequest, "token ids"),
        ([[1], [2, 3]], InvalidRequest, "token ids"),
        ([1] * 64, TooLong, "at most 63"),
    ],
)
async def test_a_prompt_that_cannot_run_is_refused_before_it_is_sent(
    core: FakeCore, client: AsyncClient, prompt: Any, error: type, match: str
) -> None:
    with pytest.raises(error, match=match):
        client.submit(prompt, SamplingParams())
    client.submit([1] * 63, SamplingParams())
    assert len(prompt_of(await heard(core, AddRequest))) == 63


@with_core(limits=EngineLimits(32, 400, 4, 5))
@pytest.mark.parametrize(
    ("params", "match"),
    [
        ({"logprobs": 6}, "logprobs must be at most 5"),
        ({"logprobs": -1, "prompt_logprobs": 6}, "^prompt_logprobs must be at most 5"),
        ({"stop_token_ids": [400]}, "stop_token_ids"),
        ({"logit_bias": {999: 1.0}}, "logit_bias"),
        ({"bad_words": ["xyz " * 10]}, "bad_words"),
        ({"stop": ["x"], "detokenize": False}, "detokenize"),
        ({"stop": ["\ud800"]}, "Unicode"),
    ],
)
async def test_params_that_cannot_run_are_refused(core: FakeCore, client: AsyncClient, params: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        client.submit([1], SamplingParams(**params))
    assert isinstance(caught.value, InvalidRequest)
    assert client.num_requests == 0
    with pytest.raises(TooLong):  # what the KV cache cannot hold is too long, whatever the context
        client.submit([1] * 32, SamplingParams())


@with_core(script=echo)
async def test_a_request_whose_state_cannot_be_made_is_aborted_and_its_rows_are_nobodys(
    core: FakeCore, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise OSError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr("quire.frontend.client.client.RequestState", broken)
        with pytest.raises(OSError, match="no memory"):
            client.submit([THE], SamplingParams(max_tokens=2, n=2, logprobs=1))
        assert client.num_requests == 0 and len(client._dispatcher._dropped_sequences) == 2  # until their ends have come
    lost = await heard(core, AddRequest)
    assert (await heard(core, Abort)).ids == [lost.id]
    assert (await last(client.generate([THE, CAT], SamplingParams(max_tokens=2)))).outputs[0].text == " the cat"


@with_core(limits=EngineLimits(20_000, 400, 4, 20))
async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(core: FakeCore, client: AsyncClient) -> None:
    with pytest.raises(TooLong, match="characters"):
        await client.tokenize("a" * 1_000_000)
    long = " the cat" * 3000  # tokenized in a thread
    assert await client.tokenize(long) == [THE, CAT] * 3000


@with_core(files={})
async def test_an_engine_without_tokenizer_takes_ids(core: FakeCore, client: AsyncClient) -> None:
    client.submit([1], SamplingParams())
    for refused in ({"stop": ["x"]}, {"bad_words": ["x"]}):
        with pytest.raises(InvalidRequest, match="no tokenizer"):
            client.submit([1], SamplingParams(**refused))
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        await anext(client.generate("text"))


# ------------------------------------------------------------------------------------------------------ what the core says
@with_core()
@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("invalid", InvalidRequest),
        ("too_long", TooLong),
        ("overloaded", Overloaded),
        ("rate_limited", RateLimited),
        ("deadline_exceeded", DeadlineExceeded),
        ("unavailable", EngineDown),
        ("engine_error", EngineError),
    ],
)
async def test_the_cores_refusals_are_typed(core: FakeCore, client: AsyncClient, code: Any, error: type) -> None:
    stream = client.submit([THE], SamplingParams(n=2))
    request = await heard(core, AddRequest)
    core.say(RequestError(core.epoch, request.id, code, "because", 7))
    with pytest.raises(error, match="because") as raised:
        await stream.collect()
    assert client.num_requests == 0 and raised.value.retry_after_s == 7


@with_core(script=echo)
async def test_many_requests_run_side_by_side(core: FakeCore, client: AsyncClient) -> None:
    prompts = [[THE] * (1 + i % 5) + [CAT] for i in range(100)]
    streams = [client.submit(p, SamplingParams(max_tokens=len(p), n=1 + i % 3)) for i, p in enumerate(prompts)]
    for prompt, stream, deltas in zip(prompts, streams, await asyncio.gather(*[s.collect() for s in streams]), strict=True):
        assert [d.token_ids for d in deltas] == [prompt] * stream.params.n


@with_core()
async def test_the_latest_heartbeat_is_kept_and_tells_the_engines_health(core: FakeCore, client: AsyncClient) -> None:
    assert client.health() is None
    for changed, problem in (
        ({"oldest_step_s": 61.0}, "stuck"),
        ({"ready": False, "oldest_step_s": 0.0}, "starting"),
        ({"ready": True, "num_running": 7}, None),
    ):
        core.announce(**changed)
        await until(lambda: client.heartbeat is not None and client.heartbeat == core.heartbeat)
        health = client.health()
        assert health is None if problem is None else problem in (health or "")
    client.heartbeat_time -= 2.1
    assert "does not answer" in (client.health() or "")


# ------------------------------------------------------------------------------------------------------------ a core that goes
def test_a_lost_core_fails_its_streams_and_its_successor_serves_again() -> None:
    with tempfile.TemporaryDirectory() as folder:  # both cores': a private one goes with its core
        asyncio.run(asyncio.wait_for(_lose_and_find_again(f"ipc://{folder}/core"), 100))


async def _lose_and_find_again(address: str) -> None:
    with FakeCore(address=address) as core:
        client = AsyncClient(address)
        await client.connect()
        stream = client.submit([THE], ENDLESS)
        collecting = asyncio.create_task(client.submit([THE], ENDLESS).collect())
        request = await heard(core, AddRequest)
        core.say(outputs([(request.id << 8, CAT)], epoch=core.epoch))
        await until(lambda: stream._state.news)
    assert [d.text for d in await anext(stream)] == [" cat"]
    for failing in (anext(stream), collecting):
        with pytest.raises(EngineDown):
            await failing
    assert not client.is_connected and "no connection" in (client.health() or "")
    with pytest.raises(EngineDown):
        client.submit([THE], ENDLESS)
    stream.cancel()
    with FakeCore(echo, files=toy_tokenizers.files(toy_tokenizers.wordpiece()), address=address) as successor:
        await until(lambda: client.is_connected)
        assert client.welcome.epoch == successor.epoch and client.health() is None
        assert client.tokenizer.backend.token_to_id("##ing") is not None
        output = await last(client.generate("the cat", SamplingParams(max_tokens=2)))
        assert output.outputs[0].text == " the cat"
        await client.close()
        await client.close()
        with pytest.raises(EngineDown):
            client.submit([THE], ENDLESS)


@pytest.mark.parametrize(("spins", "cores", "watches"), [(True, 8, [client_module.WATCH_S]), (True, 4, []), (False, 8, [])])
def test_lone_request_is_watched_for_where_there_are_cores(
    monkeypatch: pytest.MonkeyPatch, spins: bool, cores: int, watches: list[float]
) -> None:
    watched: list[float] = []
    monkeypatch.setattr(client_module, "cpu_share", lambda: cores)
    monkeypatch.setattr(FrontendToCore, "watch", lambda link, seconds: watched.append(seconds))

    async def run() -> None:
        with FakeCore(spins=spins) as core:
            async with AsyncClient(core.address) as client:
                first, _second = client.submit([THE], ENDLESS), client.submit([THE], ENDLESS)  # the second is not alone
                assert watched == watches
                request = await heard(core, AddRequest)
                core.say(outputs([], {request.id << 8: "stop"}, epoch=core.epoch))
                await first.collect()
                _third = client.submit([THE], ENDLESS)  # nor is this one
                assert watched == watches

    asyncio.run(asyncio.wait_for(run(), 100))


@with_core(script=echo)
async def test_connecting_again_changes_nothing(core: FakeCore, client: AsyncClient) -> None:
    link = client._link
    await client.connect()
    assert client._link is link
    assert (await last(client.generate([THE], SamplingParams(max_tokens=1)))).finished


def test_closing_fails_what_runs() -> None:
    async def run() -> None:
        with FakeCore() as core:
            async with AsyncClient(core.address) as client:
                stream = client.submit([THE], ENDLESS)
            with pytest.raises(EngineDown, match="closed"):
                await stream.collect()

    asyncio.run(asyncio.wait_for(run(), 100))


def test_no_core_is_an_engine_down_and_an_unreadable_tokenizer_is_said() -> None:
    async def run() -> None:
        with pytest.raises(EngineDown):
            await AsyncClient("ipc:///tmp/quire-nobody-listens-here").connect(timeout_s=0.05)
        with pytest.raises(EngineDown):
            _ = AsyncClient("ipc:///tmp/x").welcome
        with FakeCore(files={"tokenizer.json": b"{}"}) as core, pytest.raises(ValueError, match=r"tokenizer\.json"):
            await AsyncClient(core.address).connect()

    asyncio.run(asyncio.wait_for(run(), 100))


def test_errors_are_value_errors_only_where_the_request_is_wrong() -> None:
    assert issubclass(TooLong, InvalidRequest) and issubclass(InvalidRequest, ValueError)
    assert not issubclass(EngineDown, ValueError) and not issubclass(Overloaded, ValueError)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(SamplingParams()), type=SamplingParams) == SamplingParams()

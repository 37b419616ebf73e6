"""LiteLLM against the server, as its providers `openai` and `hosted_vllm`: calls, streams, tools, formats, errors."""

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
from client_packages import WEATHER, Server
from pydantic import BaseModel, Field

litellm: Any = pytest.importorskip("litellm")  # Any: it has types for some of its functions only

# Its log worker drops a coroutine when asyncio.run ends, and its pool of connections lives as long as the process.
pytestmark = [
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of pydantic, met by its copies of chunks
]

ADD = [{"role": "user", "content": "Add 3 and 5"}]
IN_PARIS = [{"role": "user", "content": "What is the weather in Paris?"}]
PROVIDERS = pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])

Options = Callable[[str], dict[str, Any]]


class Person(BaseModel):
    name: Literal["Ann", "Tom"]
    age: int = Field(ge=0, le=99)


@pytest.fixture(scope="module", autouse=True)
def loop() -> Iterator[None]:
    """LiteLLM asks for the main thread's event loop, also without awaiting anything. One that it had to make, nobody closes."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    asyncio.set_event_loop(None)
    loop.close()


@pytest.fixture
def options(server: Server) -> Options:
    def make(provider: str) -> dict[str, Any]:
        return {
            "model": f"{provider}/{server.model}",
            "api_base": server.base_url,
            "api_key": server.key,
            "temperature": 0.0,
            "max_tokens": 60,
            "num_retries": 0,
        }

    return make


def content(answer: Any) -> Any:
    return answer.choices[0].message.content


def test_a_call_and_a_stream(options: Options) -> None:
    assert content(litellm.completion(messages=ADD, **options("openai"))) == "8"
    chunks = litellm.completion(messages=ADD, stream=True, **options("openai"))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "8"


@pytest.mark.slow
@PROVIDERS
def test_streams_with_usage_and_put_together_again(options: Options, provider: str) -> None:
    kept = {**options(provider), "stream": True, "stream_options": {"include_usage": True}}
    chunks = list(litellm.completion(messages=ADD, **kept))
    whole = litellm.completion(messages=ADD, **options(provider))
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    chunks = list(litellm.completion(messages=IN_PARIS, tools=[WEATHER], **kept))
    assert "tool_calls" in [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    (call,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})


@pytest.mark.slow
@PROVIDERS
def test_tools_and_what_they_answered(options: Options, provider: str) -> None:
    kept = options(provider)
    answer = litellm.completion(messages=IN_PARIS, tools=[WEATHER], **kept).choices[0].message
    (call,) = answer.tool_calls
    told = [*IN_PARIS, answer, {"role": "tool", "tool_call_id": call.id, "name": "get_weather", "content": "42"}]
    assert content(litellm.completion(messages=told, tools=[WEATHER], **kept)) == "The result is 42."
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        message = litellm.completion(messages=ADD, tools=[WEATHER], tool_choice=choice, **kept).choices[0].message
        assert {c.function.name for c in message.tool_calls} == {"get_weather"}


@pytest.mark.slow
@PROVIDERS
def test_response_formats(options: Options, provider: str) -> None:
    kept = options(provider)
    assert Person.model_validate_json(content(litellm.completion(messages=ADD, response_format=Person, **kept)))
    assert isinstance(
        json.loads(content(litellm.completion(messages=ADD, response_format={"type": "json_object"}, **kept))), dict
    )
    schema = {"type": "json_schema", "json_schema": {"name": "p", "schema": Person.model_json_schema(), "strict": True}}
    assert Person.model_validate_json(content(litellm.completion(messages=ADD, response_format=schema, **kept)))


@pytest.mark.slow
@pytest.mark.parametrize("provider", ["text-completion-openai", "hosted_vllm"])
def test_text_completions(options: Options, provider: str) -> None:
    kept = options(provider)
    text = litellm.text_completion(prompt="Once upon a time", **kept).choices[0].text
    both = litellm.text_completion(prompt=["Once upon a time", "The cat"], logprobs=1, **kept).choices
    assert text and both[0].text == text and len(both) == 2
    chunks = litellm.text_completion(prompt="Once upon a time", stream=True, **kept)
    assert "".join(chunk.choices[0].text or "" for chunk in chunks) == text


@pytest.mark.slow
@PROVIDERS
def test_asynchronous_calls_and_batches(options: Options, provider: str) -> None:
    kept = options(provider)

    async def main() -> None:
        assert content(await litellm.acompletion(messages=ADD, **kept)) == "8"
        stream = await litellm.acompletion(messages=ADD, stream=True, **kept)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "8"
        many = [[{"role": "user", "content": f"Add {n} and 5"}] for n in range(6)]
        answers = await asyncio.gather(*(litellm.acompletion(messages=m, **kept) for m in many))
        assert [content(a) for a in answers] == [str(n + 5) for n in range(6)]

    asyncio.run(main())
    assert [content(a) for a in litellm.batch_completion(messages=[ADD, ADD], **kept)] == ["8", "8"]


@pytest.mark.slow
@PROVIDERS
def test_options_of_vllm_and_errors_by_their_class(options: Options, provider: str) -> None:
    kept = options(provider)
    assert content(litellm.completion(messages=ADD, top_k=3, min_p=0.1, extra_body={"ignore_eos": False}, **kept)) == "8"
    for change, error in (
        ({"model": f"{provider}/other"}, litellm.NotFoundError),
        ({"api_key": "wrong"}, litellm.AuthenticationError),
        ({"messages": [{"role": "user", "content": "Add 3 and 5 " * 2000}]}, litellm.ContextWindowExceededError),
        ({"temperature": -1.0}, litellm.BadRequestError),
    ):
        with pytest.raises(error):
            litellm.completion(**{"messages": ADD, **kept, **change})


@pytest.mark.slow
def test_thinking_is_asked_for_in_either_way(options: Options) -> None:
    """The bundled model has no thoughts; what LiteLLM makes of its two options is taken all the same."""
    for fields in ({"reasoning_effort": "low"}, {"thinking": {"type": "enabled", "budget_tokens": 100}}):
        assert content(litellm.completion(messages=ADD, **fields, **options("hosted_vllm"))) == "8"

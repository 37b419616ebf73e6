"""The `anthropic` package against /v1/messages: calls, its streams and their events, tools, its runner of tools, errors."""

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import pytest
from anthropic import beta_tool
from client_packages import WEATHER, Server
from pydantic import BaseModel, Field

# The newest version of the package has no argument for a temperature any more.
GREEDY: dict[str, Any] = {"model": "tiny", "max_tokens": 60, "extra_body": {"temperature": 0.0}}
ADD: Any = [{"role": "user", "content": "Add 3 and 5"}]
IN_PARIS: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
FUNCTION: Any = WEATHER["function"]
TOOL: Any = {**{k: FUNCTION[k] for k in ("name", "description")}, "input_schema": FUNCTION["parameters"]}


class Person(BaseModel):
    name: Literal["Ann", "Tom"]
    age: int = Field(ge=0, le=99)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key=server.key, max_retries=0) as client:
        yield client


def text_of(message: Any) -> str:
    (block,) = message.content
    return str(block.text)


def test_a_message_and_a_stream(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(messages=ADD, **GREEDY)
    assert text_of(whole) == "8" and whole.stop_reason == "end_turn" and whole.usage.output_tokens == 2
    with client.messages.stream(messages=ADD, **GREEDY) as stream:
        assert "".join(stream.text_stream) == "8"
        final = stream.get_final_message()
    assert final.usage.input_tokens == whole.usage.input_tokens and final.stop_reason == "end_turn"


@pytest.mark.slow
def test_options_and_what_is_counted(client: anthropic.Anthropic) -> None:
    system: Any = [{"type": "text", "text": "You can add.", "cache_control": {"type": "ephemeral"}}]
    message = client.messages.create(
        messages=ADD, system=system, metadata={"user_id": "u"}, stop_sequences=["never said"], **GREEDY
    )
    assert text_of(message) == "8"
    counted = client.messages.count_tokens(model="tiny", messages=ADD, system=system).input_tokens
    assert counted == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
    stopped = client.messages.create(
        messages=[{"role": "user", "content": "Tell me about a dog."}], stop_sequences=["a "], **GREEDY
    )
    assert stopped.stop_reason == "stop_sequence" and stopped.stop_sequence == "a "
    cut = client.messages.create(messages=[{"role": "user", "content": "Tell me about a dog."}], **{**GREEDY, "max_tokens": 2})
    assert cut.stop_reason == "max_tokens"
    assert isinstance(client.messages.parse(messages=ADD, output_format=Person, **GREEDY).parsed_output, Person)
    assert [model.id for model in client.models.list()] == ["tiny"]
    raw = client.messages.with_raw_response.create(messages=ADD, **GREEDY)
    assert raw.headers["content-type"] == "application/json" and text_of(raw.parse()) == "8"


@pytest.mark.slow
def test_tools_streamed_or_not_and_what_they_answered(client: anthropic.Anthropic) -> None:
    message = client.messages.create(messages=IN_PARIS, tools=[TOOL], **GREEDY)
    (call,) = message.content
    assert call.type == "tool_use" and (call.name, call.input) == ("get_weather", {"city": "Paris"})
    assert message.stop_reason == "tool_use"
    with client.messages.stream(messages=IN_PARIS, tools=[TOOL], **GREEDY) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        (streamed,) = stream.get_final_message().content
    assert streamed.type == "tool_use" and streamed.input == call.input and len(pieces) > 2
    result: Any = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "42"}]}
    turn: Any = [*IN_PARIS, {"role": "assistant", "content": message.content}, result]
    assert text_of(client.messages.create(messages=turn, tools=[TOOL], **GREEDY)) == "The result is 42."
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "get_weather"}):
        forced: Any = client.messages.create(messages=ADD, tools=[TOOL], tool_choice=choice, **GREEDY)
        assert [block.name for block in forced.content] == ["get_weather"]
    silent = client.messages.create(messages=IN_PARIS, tools=[TOOL], tool_choice={"type": "none"}, **GREEDY)
    assert [block.type for block in silent.content] == ["text"]


@pytest.mark.slow
def test_the_packages_runner_of_tools(client: anthropic.Anthropic) -> None:
    asked = []

    @beta_tool
    def get_weather(city: str) -> str:
        """Get the weather of a city."""
        asked.append(city)
        return "42"

    final = client.beta.messages.tool_runner(messages=IN_PARIS, tools=[get_weather], **GREEDY).until_done()
    assert asked == ["Paris"] and text_of(final) == "The result is 42."


@pytest.mark.slow
def test_the_asynchronous_client(server: Server) -> None:
    async def main() -> None:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key=server.key, max_retries=0) as client:
            async with client.messages.stream(messages=ADD, **GREEDY) as stream:
                assert "".join([text async for text in stream.text_stream]) == "8"
            answers: Any = await asyncio.gather(*(client.messages.create(messages=ADD, **GREEDY) for _ in range(6)))
            assert [text_of(answer) for answer in answers] == ["8"] * 6

    asyncio.run(main())


@pytest.mark.slow
def test_errors_are_exceptions_of_the_right_kind(client: anthropic.Anthropic) -> None:
    picture: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    for change, kind in (
        ({"model": "other"}, anthropic.NotFoundError),
        ({"max_tokens": -1}, anthropic.BadRequestError),
        ({"messages": [{"role": "user", "content": [picture]}]}, anthropic.BadRequestError),
        ({"messages": [{"role": "user", "content": "Add 3 and 5 " * 2000}]}, anthropic.BadRequestError),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1100}, anthropic.BadRequestError),
    ):
        with pytest.raises(kind):
            client.messages.create(**{"messages": ADD, **GREEDY, **change})
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(messages=ADD, **GREEDY)
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.list()

"""/v1/responses with the helpers of the `openai` package, LangChain and LiteLLM: parse, stream, tools, turns that follow on."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from client_packages import WEATHER, Server
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0.0, "max_output_tokens": 60}
TOOL: Any = {"type": "function", **WEATHER["function"]}
IN_PARIS = "What is the weather in Paris?"


class Person(BaseModel):
    name: Literal["Ann", "Tom"]
    age: int = Field(ge=0, le=99)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.base_url, api_key=server.key, max_retries=0) as client:
        yield client


def test_a_response_and_a_stream(client: openai.OpenAI) -> None:
    whole = client.responses.create(input="Add 3 and 5", **GREEDY)
    assert whole.output_text == "8" and whole.status == "completed" and whole.usage is not None
    with client.responses.stream(input="Add 3 and 5", **GREEDY) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == "8" and kinds[0] == "response.created" and kinds[-1] == "response.completed"


@pytest.mark.slow
def test_parse_whole_and_streamed(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(input="Tell me about a person", text_format=Person, **GREEDY).output_parsed
    assert isinstance(parsed, Person)
    with client.responses.stream(input="Tell me about a person", text_format=Person, **GREEDY) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == parsed


@pytest.mark.slow
def test_function_tools_and_the_turn_that_follows(client: openai.OpenAI) -> None:
    first = client.responses.create(input=IN_PARIS, tools=[TOOL], **GREEDY)
    (call,) = (item for item in first.output if item.type == "function_call")
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
    second = client.responses.create(previous_response_id=first.id, input=[result], tools=[TOOL], **GREEDY)
    assert second.output_text == "The result is 42." and second.previous_response_id == first.id
    assert client.responses.retrieve(second.id).output_text == second.output_text
    items: Any = [{"role": "user", "content": IN_PARIS}, *first.output, result]
    assert client.responses.create(input=items, tools=[TOOL], store=False, **GREEDY).output_text == "The result is 42."
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with client.responses.stream(input=IN_PARIS, tools=[TOOL], **GREEDY) as stream:
        done = [event for event in stream if event.type == "response.function_call_arguments.done"]
    assert [json.loads(event.arguments) for event in done] == [{"city": "Paris"}]


@pytest.mark.slow
def test_the_asynchronous_client_and_errors(server: Server) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key=server.key, max_retries=0) as client:
            assert (await client.responses.create(input="Add 3 and 5", **GREEDY)).output_text == "8"
            stream = await client.responses.create(input="Add 3 and 5", stream=True, **GREEDY)
            assert "".join([e.delta async for e in stream if e.type == "response.output_text.delta"]) == "8"
            with pytest.raises(openai.BadRequestError):
                await client.responses.create(input="x", tools=[{"type": "web_search"}], **GREEDY)
            with pytest.raises(openai.NotFoundError):
                await client.responses.create(input="x", **{**GREEDY, "model": "other"})

    asyncio.run(main())


@tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return "42"


@pytest.mark.slow
def test_langchain_over_responses(server: Server) -> None:
    where: Any = {"model": "tiny", "base_url": server.base_url, "api_key": server.key, "max_retries": 0}
    model = ChatOpenAI(**where, use_responses_api=True, temperature=0.0, max_tokens=60)
    assert model.invoke("Add 3 and 5").text == "8"
    assert "".join(chunk.text for chunk in model.stream("Add 3 and 5")) == "8"
    agent, messages = model.bind_tools([get_weather]), [HumanMessage(IN_PARIS)]
    answer = agent.invoke(messages)
    assert [call["args"] for call in answer.tool_calls] == [{"city": "Paris"}]
    messages += [answer, *(get_weather.invoke(call) for call in answer.tool_calls)]
    assert agent.invoke(messages).text == "The result is 42."
    assert isinstance(model.with_structured_output(Person, method="json_schema").invoke("Tell me about a person"), Person)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::DeprecationWarning")
def test_litellm_over_responses(server: Server) -> None:
    litellm: Any = pytest.importorskip("litellm")
    where = {"model": "openai/tiny", "api_base": server.base_url, "api_key": server.key, "temperature": 0.0}
    assert litellm.responses(input="Add 3 and 5", **where).output_text == "8"
    *_, last = litellm.responses(input="Add 3 and 5", stream=True, **where)
    assert last.type == "response.completed"

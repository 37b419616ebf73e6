"""LangChain's models of `langchain-openai` against the server: calls, streams, batches, tools, the three structured methods."""

import asyncio
from collections.abc import Callable
from typing import Any, Literal

import pytest
from client_packages import Server
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

Model = Callable[..., ChatOpenAI]


class Person(BaseModel):
    """A person."""

    name: Literal["Ann", "Tom"]
    age: int = Field(ge=0, le=99)


@tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"{len(city)}"


@pytest.fixture
def model(server: Server) -> Model:
    def make(**options: Any) -> ChatOpenAI:
        where = {"model": "tiny", "base_url": server.base_url, "api_key": server.key, "max_retries": 0}
        return ChatOpenAI(**{**where, "temperature": 0.0, "max_tokens": 80, **options})

    return make


def test_an_agent_of_a_loop_and_a_tool(model: Model) -> None:
    """Asked, called, told, answered: what LangChain's agents do, by hand."""
    agent = model().bind_tools([get_weather])
    messages: list[Any] = [HumanMessage("What is the weather in Paris?")]
    while (answer := agent.invoke(messages)).tool_calls:
        messages += [answer, *(get_weather.invoke(call) for call in answer.tool_calls)]
        assert len(messages) < 8
    assert [type(m) for m in messages] == [HumanMessage, AIMessage, ToolMessage] and messages[-1].content == "5"
    assert answer.content == "The result is 5." and answer.usage_metadata is not None
    assert answer.usage_metadata["total_tokens"] == answer.response_metadata["token_usage"]["total_tokens"]


@pytest.mark.slow
def test_calls_streams_and_batches(model: Model) -> None:
    chat = model()
    messages = [SystemMessage("You can add."), HumanMessage("Add 3 and 5")]
    assert chat.invoke(messages).content == chat.invoke("Add 3 and 5").content == "8"
    chunks = list(model(stream_usage=True).stream("Add 3 and 5"))
    whole = sum(chunks[1:], start=chunks[0])
    assert whole.content == "8" and whole.usage_metadata["output_tokens"] == 2 and len(chunks) >= 3
    assert [m.content for m in chat.batch([f"Add {n} and 5" for n in range(6)])] == [str(n + 5) for n in range(6)]

    async def main() -> None:
        assert (await chat.ainvoke("Add 3 and 5")).content == "8"
        assert "".join([c.content async for c in chat.astream("Add 3 and 5")]) == "8"
        kinds = [event["event"] async for event in chat.astream_events("Add 3 and 5", version="v2")]
        assert kinds[0] == "on_chat_model_start" and kinds[-1] == "on_chat_model_end" and "on_chat_model_stream" in kinds

    asyncio.run(main())


@pytest.mark.slow
def test_options_reach_the_engine(model: Model) -> None:
    assert "dog" not in model(stop=["dog"]).invoke("Tell me about a dog.").content
    logprobs = model(logprobs=True, top_logprobs=2).invoke("Add 3 and 5").response_metadata["logprobs"]["content"]
    assert logprobs[0]["token"] == "8" and len(logprobs[0]["top_logprobs"]) == 2
    seeded = model(temperature=1.0, seed=7, extra_body={"top_k": 40, "min_p": 0.01}, max_tokens=20)
    assert seeded.invoke("Tell me about a dog.").content == seeded.invoke("Tell me about a dog.").content
    assert model(max_tokens=3).invoke("Tell me about a dog.").response_metadata["finish_reason"] == "length"
    answers = model(n=3, temperature=1.0).generate([[HumanMessage("Tell me about a dog.")]]).generations[0]
    assert len({answer.text for answer in answers}) == 3


@pytest.mark.slow
@pytest.mark.parametrize("strict", [None, True])
@pytest.mark.parametrize("choice", ["get_weather", "any", "auto", {"type": "function", "function": {"name": "get_weather"}}])
def test_tools_chosen_in_every_way(model: Model, choice: Any, strict: bool | None) -> None:
    options = {"tool_choice": choice, "parallel_tool_calls": False, "strict": strict}
    calling = model().bind_tools([get_weather], **options)
    asked = "What is the weather in Paris?"
    calls = calling.invoke(asked).tool_calls
    assert [call["name"] for call in calls] == ["get_weather"] and isinstance(calls[0]["args"]["city"], str)
    chunks = list(calling.stream(asked))
    whole = sum(chunks[1:], start=chunks[0])
    assert [(c["name"], c["args"]) for c in whole.tool_calls] == [(c["name"], c["args"]) for c in calls]


@pytest.mark.slow
@pytest.mark.parametrize("strict", [None, True])
@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of what the openai package parsed, by LangChain
def test_structured_output_that_the_server_enforces(model: Model, method: Any, strict: bool | None) -> None:
    asked, kept = "Tell me about a person", model().with_structured_output(Person, method=method, strict=strict)
    person = kept.invoke(asked)
    assert isinstance(person, Person) and list(kept.stream(asked))[-1] == person
    raw: Any = model().with_structured_output(Person, method=method, strict=strict, include_raw=True).invoke(asked)
    assert raw["parsed"] == person and raw["parsing_error"] is None
    schema = {"title": "Person", **Person.model_json_schema()}
    plain: Any = model().with_structured_output(schema, method=method, strict=strict).invoke(asked)
    assert Person.model_validate(plain)


@pytest.mark.slow
def test_json_mode_gives_json_of_any_shape(model: Model) -> None:
    answer: Any = model().with_structured_output(None, method="json_mode", include_raw=True).invoke("Give me json")
    assert isinstance(answer["parsed"], dict) and answer["parsing_error"] is None


@pytest.mark.slow
def test_the_completions_model(server: Server) -> None:
    where = {"model": "tiny", "base_url": server.base_url, "api_key": server.key, "max_retries": 0}
    model = OpenAI(**where, temperature=0.0, max_tokens=12)  # type: ignore[arg-type]
    text = model.invoke("Once upon a time")
    assert text and "".join(model.stream("Once upon a time")) == text
    assert model.batch(["Once upon a time", "The cat"])[0] == text
    two = OpenAI(**where, n=2, best_of=2, max_tokens=12, logprobs=2).generate(["Once", "The cat"])  # type: ignore[arg-type]
    assert [len(answers) for answers in two.generations] == [2, 2] and two.llm_output is not None
    assert two.llm_output["token_usage"]["total_tokens"] > 0
    assert two.generations[0][0].generation_info["logprobs"]["tokens"]

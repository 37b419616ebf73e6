"""The `openai` package's helpers: parse, stream, raw answers, pages of files and batches. Its plain calls: tests/serving."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from client_packages import WEATHER, Server
from pydantic import BaseModel, Field
from serving import until

GREEDY = {"model": "tiny", "temperature": 0.0, "max_tokens": 60}
ADD = [{"role": "user", "content": "Add 3 and 5"}]
IN_PARIS = [{"role": "user", "content": "What is the weather in Paris?"}]


class Person(BaseModel):
    name: Literal["Ann", "Tom"]
    age: int = Field(ge=0, le=99)


class GetWeather(BaseModel):
    city: Literal["Paris", "Rome"]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.base_url, api_key=server.key, max_retries=0) as client:
        yield client


def test_parse_gives_an_object_of_the_class(client: openai.OpenAI) -> None:
    message = client.chat.completions.parse(messages=ADD, response_format=Person, **GREEDY).choices[0].message
    assert isinstance(message.parsed, Person) and message.content and json.loads(message.content)["age"] == message.parsed.age


@pytest.mark.slow
def test_parse_gives_arguments_of_the_class_of_a_strict_tool(client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    choice: Any = {"type": "function", "function": {"name": "get_weather"}}
    for tool_choice in (choice, "required"):
        options: Any = {"tools": [tool], "tool_choice": tool_choice, "parallel_tool_calls": False}
        message = client.chat.completions.parse(messages=ADD, **options, **GREEDY).choices[0].message
        assert message.tool_calls and all(isinstance(c.function.parsed_arguments, GetWeather) for c in message.tool_calls)
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(messages=ADD, response_format=Person, **{**GREEDY, "max_tokens": 3})


@pytest.mark.slow
def test_streams_of_the_helper_end_in_what_the_whole_answer_is(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {**GREEDY, "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 2}
    with client.chat.completions.stream(messages=ADD, response_format=Person, **options) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"content.delta", "content.done", "logprobs.content.delta", "chunk"} <= kinds
    assert isinstance(final.choices[0].message.parsed, Person) and final.usage is not None
    whole = client.chat.completions.parse(messages=ADD, response_format=Person, **GREEDY)
    assert whole.choices[0].message.content == final.choices[0].message.content and whole.usage is not None
    assert whole.usage.completion_tokens == final.usage.completion_tokens
    with client.chat.completions.stream(messages=IN_PARIS, tools=[WEATHER], **GREEDY) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
    assert [(d.name, json.loads(d.arguments)) for d in done] == [("get_weather", {"city": "Paris"})]


@pytest.mark.slow
def test_raw_and_streamed_answers_and_their_headers(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        messages=ADD, extra_headers={"X-Request-Id": "mine-1"}, extra_query={"trace": "1"}, extra_body={"top_k": 5}, **GREEDY
    )
    assert raw.headers["x-request-id"] == "mine-1" and raw.parse().choices[0].message.content == "8"
    with client.chat.completions.with_streaming_response.create(messages=ADD, **GREEDY) as response:
        assert json.loads(response.read())["choices"][0]["message"]["content"] == "8"
    with client.completions.with_streaming_response.create(prompt="The cat", stream=True, model="tiny") as response:
        assert list(response.iter_lines())[-2:] == ["data: [DONE]", ""]


@pytest.mark.slow
def test_the_asynchronous_client_and_many_at_once(server: Server) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key=server.key, max_retries=0) as client:
            create = client.chat.completions.create
            asked = [[{"role": "user", "content": f"Add {n} and 5"}] for n in range(12)]
            answers: Any = await asyncio.gather(*(create(messages=messages, **GREEDY) for messages in asked))
            assert [a.choices[0].message.content for a in answers] == [str(n + 5) for n in range(12)]
            stream = await create(messages=ADD, stream=True, **GREEDY)
            assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "8"
            async with client.chat.completions.stream(messages=ADD, **GREEDY) as events:
                assert (await events.get_final_completion()).choices[0].message.content == "8"
            assert [m.id async for m in client.models.list()] == ["tiny"]
            stream = await create(messages=ADD, stream=True, **{**GREEDY, "max_tokens": 1000}, extra_body={"ignore_eos": True})
            await anext(aiter(stream))
            await stream.close()  # hangs up

    asyncio.run(main())


@pytest.mark.slow
def test_files_and_a_batch_with_the_packages_pages(client: openai.OpenAI, server: Server) -> None:
    body = {"messages": ADD, **GREEDY}
    lines = [{"custom_id": f"r{n}", "method": "POST", "url": "/v1/chat/completions", "body": body} for n in range(2)]
    data = "\n".join(map(json.dumps, lines)).encode()
    files = [client.files.create(file=("in.jsonl", data), purpose="batch") for _ in range(3)]
    assert {f.id for f in files} <= {f.id for f in client.files.list(limit=1)}  # page by page
    assert client.files.retrieve(files[0].id).bytes == len(data) and client.files.content(files[0].id).read() == data
    for file in files[1:]:
        assert client.files.delete(file.id).deleted
    batch = client.batches.create(input_file_id=files[0].id, endpoint="/v1/chat/completions", completion_window="24h")
    assert batch.id in {b.id for b in client.batches.list()}
    until(lambda: client.batches.retrieve(batch.id).status in ("completed", "failed"))
    batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed" and batch.output_file_id and batch.request_counts
    answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert {a["custom_id"] for a in answers} == {"r0", "r1"} and batch.request_counts.completed == 2
    assert {a["response"]["body"]["choices"][0]["message"]["content"] for a in answers} == {"8"}


@pytest.mark.slow
def test_what_is_not_here_says_so(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        client.embeddings.create(model="tiny", input="x")
    assert caught.value.status_code == 501
    for call in (
        lambda: client.moderations.create(input="x"),
        lambda: client.images.generate(prompt="x"),
        lambda: client.vector_stores.list(),
    ):
        with pytest.raises(openai.NotFoundError):
            call()
    with pytest.raises(openai.BadRequestError, match="image_url"):
        picture: Any = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
        client.chat.completions.create(messages=[{"role": "user", "content": [picture]}], model="tiny")
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(messages=ADD, model="tiny", functions=[WEATHER["function"]])  # type: ignore[list-item]

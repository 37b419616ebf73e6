"""Images through the `openai`, `anthropic` and LangChain packages: each API makes the same prompt, and so the same answer."""

import base64
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
import seeing_model
from client_packages import KEY, WEATHER
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from serving import SMALL, Served

A, B = (base64.b64encode(seeing_model.png(seeing_model.image(90, 60, seed))).decode() for seed in (1, 2))
IMAGE: Any = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{A}"}}
TEXT: Any = {"type": "text", "text": "hello"}
COUNT = 12
OPTIONS: dict[str, Any] = {"model": "seeing", "temperature": 0.0}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    model = str(seeing_model.seeing("qwen3-vl"))
    flags = ("--api-key", KEY, "--served-model-name", "seeing", "--max-model-len", "512", "--tool-call-parser", "hermes")
    with Served(model, *SMALL, *flags) as served:
        yield served.ready().url
        assert served.end() == 0


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def messages(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def wanted(client: openai.OpenAI) -> tuple[str, int]:
    """The text, and how many tokens the prompt has."""
    chat: Any = [{"role": "user", "content": [IMAGE, TEXT]}]
    answer = client.chat.completions.create(messages=chat, max_tokens=COUNT, **OPTIONS)
    assert answer.usage is not None and answer.choices[0].message.content
    details: Any = answer.usage.prompt_tokens_details
    assert details.multimodal_tokens == {"image": 6}
    return answer.choices[0].message.content, answer.usage.prompt_tokens


def source(data: str) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def test_a_streamed_chat(client: openai.OpenAI, wanted: tuple[str, int]) -> None:
    chat: Any = [{"role": "user", "content": [IMAGE, TEXT]}]
    chunks = client.chat.completions.create(messages=chat, max_tokens=COUNT, stream=True, **OPTIONS)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == wanted[0]


def test_responses(client: openai.OpenAI, wanted: tuple[str, int]) -> None:
    parts = [{"type": "input_image", "image_url": f"data:image/png;base64,{A}"}, {"type": "input_text", "text": "hello"}]
    given: Any = [{"role": "user", "content": parts}]
    answer = client.responses.create(input=given, max_output_tokens=COUNT, **OPTIONS)
    assert answer.output_text == wanted[0] and answer.usage is not None and answer.usage.input_tokens == wanted[1]
    found: Any = [
        {"role": "user", "content": "hello"},
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Paris"}'},
        {"type": "function_call_output", "call_id": "c1", "output": [parts[0]]},
    ]
    tools: Any = [{"type": "function", **WEATHER["function"]}]  # type: ignore[dict-item]
    with_image = client.responses.create(input=found, tools=tools, max_output_tokens=1, **OPTIONS)
    found[-1]["output"] = "sunny"
    without = client.responses.create(input=found, tools=tools, max_output_tokens=1, **OPTIONS)
    assert with_image.usage is not None and without.usage is not None
    assert with_image.usage.input_tokens > without.usage.input_tokens


def test_messages(messages: anthropic.Anthropic, wanted: tuple[str, int]) -> None:
    given: Any = [{"role": "user", "content": [source(A), TEXT]}]
    greedy: dict[str, Any] = {"model": "seeing", "max_tokens": COUNT, "extra_body": {"temperature": 0.0}}
    answer: Any = messages.messages.create(messages=given, **greedy)
    assert answer.content[0].text == wanted[0]
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == wanted[1]
    with messages.messages.stream(messages=given, **greedy) as stream:
        assert "".join(stream.text_stream) == wanted[0]
    assert messages.messages.count_tokens(model="seeing", messages=given).input_tokens == wanted[1]


def test_an_image_in_the_result_of_a_tool(messages: anthropic.Anthropic) -> None:
    def asked(*content: Any) -> int:
        given: Any = [
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "screenshot", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [*content]}]},
        ]
        tools: Any = [{"name": "screenshot", "input_schema": {"type": "object", "properties": {}}}]
        answer = messages.messages.create(model="seeing", messages=given, tools=tools, max_tokens=1)
        assert messages.messages.count_tokens(model="seeing", messages=given, tools=tools).input_tokens > 0
        return answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)

    assert asked(TEXT, source(B)) - asked(TEXT) >= 8  # its 6 tokens, and those around them


def test_langchain(url: str, wanted: tuple[str, int]) -> None:
    chat = ChatOpenAI(base_url=f"{url}/v1", api_key=KEY, max_completion_tokens=COUNT, max_retries=0, **OPTIONS)  # type: ignore[arg-type]
    for image in (IMAGE, {"type": "image", "base64": A, "mime_type": "image/png"}):
        assert chat.invoke([HumanMessage(content=[image, TEXT])]).content == wanted[0]


def test_a_broken_image_is_the_clients_error(client: openai.OpenAI, messages: anthropic.Anthropic) -> None:
    broken: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}]
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\].content\[0\]"):
        client.chat.completions.create(messages=broken, **OPTIONS)
    given: Any = [{"role": "user", "content": [source("AAAA")]}]
    with pytest.raises(anthropic.BadRequestError, match=r"messages\.?\[?0\]?\.content"):
        messages.messages.create(model="seeing", messages=given, max_tokens=1)

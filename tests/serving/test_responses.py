"""The `openai` package's Responses API against `quire serve` with the bundled model, on two frontends."""

import json
from collections.abc import Iterator

import pydantic
import pytest
from deadlines import DEADLINE_S
from serving import SMALL, Served

openai = pytest.importorskip("openai")

MINE, THEIRS = "mine", "theirs"
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
GREEDY = {"model": "tiny", "temperature": 0.0, "max_output_tokens": 40}
IN_PARIS = "What is the weather in Paris?"


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    options = ("--served-model-name", "tiny", "--max-model-len", "512", "--frontends", "2")
    with Served(*SMALL, "--api-key", MINE, "--api-key", THEIRS, *options) as served:
        served.ready()
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key=MINE, max_retries=0, timeout=DEADLINE_S) as client:
            yield client
        assert served.end() == 0


def test_a_stream_says_what_an_answer_in_one_piece_says(client: openai.OpenAI) -> None:
    body = {"input": "Tell me about a dog.", "instructions": "Be brief.", **GREEDY}
    whole = client.responses.create(**body)
    assert whole.id.startswith("resp_") and whole.status in ("completed", "incomplete") and len(whole.output_text) > 10
    with client.responses.stream(**body) as stream:
        events = list(stream)
    last = events[-1].response
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text == last.output_text
    assert last.usage.output_tokens == whole.usage.output_tokens and last.usage.input_tokens == whole.usage.input_tokens
    short = client.responses.create(**{**body, "max_output_tokens": 2})
    assert short.status == "incomplete" and short.incomplete_details.reason == "max_output_tokens"


def test_parse_makes_a_model_of_the_answer(client: openai.OpenAI) -> None:
    class Dog(pydantic.BaseModel):
        good: bool
        size: int = pydantic.Field(ge=0, le=9)

    body = {"input": "Tell me about a dog.", "text_format": Dog, **GREEDY}
    assert isinstance(client.responses.parse(**body).output_parsed, Dog)
    with client.responses.stream(**body) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Dog)


def test_a_function_is_called_and_its_output_spoken_of(client: openai.OpenAI) -> None:
    options = {**GREEDY, "tools": [WEATHER]}
    with client.responses.stream(input=IN_PARIS, **options) as stream:
        deltas = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        first = stream.get_final_response()
    (call,) = first.output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "get_weather", {"city": "Paris"})
    assert "".join(deltas) == call.arguments and len(deltas) > 2
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
    kept = client.responses.create(input=[output], previous_response_id=first.id, **options)
    sent = client.responses.create(input=[{"role": "user", "content": IN_PARIS}, call, output], store=False, **options)
    assert kept.output_text == sent.output_text == "The result is 42."
    forced = client.responses.create(input="Hello", tool_choice={"type": "function", "name": "get_weather"}, **options)
    assert forced.output[0].name == "get_weather"


def test_responses_are_kept_for_whoever_made_them_at_both_frontends(client: openai.OpenAI) -> None:
    first = client.responses.create(input=IN_PARIS, metadata={"a": "b"}, **GREEDY)
    stranger = client.with_options(api_key=THEIRS)
    for _ in range(8):  # connections of their own, at one frontend or the other
        with openai.OpenAI(base_url=client.base_url, api_key=MINE, max_retries=0) as other:
            found = other.responses.retrieve(first.id)
            assert found.output_text == first.output_text and found.metadata == {"a": "b"}
    with pytest.raises(openai.NotFoundError):
        stranger.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError, match="not found"):
        stranger.responses.create(input="and?", previous_response_id=first.id, **GREEDY)
    second = client.responses.create(input="And in Rome?", previous_response_id=first.id, **GREEDY)
    items = client.responses.input_items.list(second.id, order="asc", limit=2)
    assert [item.role for item in items] == ["user", "assistant", "user"]  # over two pages
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    assert client.responses.retrieve(second.id).status == second.status


def test_in_the_background(client: openai.OpenAI) -> None:
    begun = client.responses.create(input="Tell me about a dog.", background=True, **GREEDY)
    while (now := client.responses.retrieve(begun.id)).status == "in_progress":
        pass
    assert now.status in ("completed", "incomplete") and now.output_text
    assert client.responses.cancel(begun.id).status == now.status


def test_log_probabilities_of_the_text(client: openai.OpenAI) -> None:
    include = ["message.output_text.logprobs"]
    answer = client.responses.create(input="Tell me about a dog.", include=include, top_logprobs=3, **GREEDY)
    part = answer.output[0].content[0]
    assert "".join(row.token for row in part.logprobs) == part.text
    assert all(row.token == row.top_logprobs[0].token and len(row.top_logprobs) == 3 for row in part.logprobs)

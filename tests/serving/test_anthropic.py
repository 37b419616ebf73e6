"""The `anthropic` package against `quire serve` with the bundled model: what a user of it, or of Claude Code, can see."""

import asyncio
from collections.abc import Iterator

import pytest
from deadlines import DEADLINE_S
from serving import SMALL, Served

anthropic = pytest.importorskip("anthropic")
pydantic = pytest.importorskip("pydantic")

KEY = "secret"
MESSAGES = [{"role": "user", "content": "Tell me about a dog."}]
GREEDY = {"model": "tiny", "max_tokens": 16, "extra_body": {"temperature": 0.0}}
WEATHER = {
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
IN_PARIS = {"role": "user", "content": "What is the weather in Paris?"}


@pytest.fixture(scope="module")
def client() -> Iterator[anthropic.Anthropic]:
    with Served(*SMALL, "--api-key", KEY, "--served-model-name", "tiny", "--max-model-len", "256") as served:
        served.ready()
        with anthropic.Anthropic(base_url=served.url, api_key=KEY, max_retries=0, timeout=DEADLINE_S) as client:
            yield client
        assert served.end() == 0


def test_a_stream_says_what_an_answer_in_one_piece_says(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(messages=MESSAGES, system="Be brief.", **GREEDY)
    assert (whole.type, whole.role, whole.model) == ("message", "assistant", "tiny") and whole.id.startswith("msg_")
    with client.messages.stream(messages=MESSAGES, system="Be brief.", **GREEDY) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(texts) > 3 and "".join(texts) == final.content[0].text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason == "max_tokens" and final.usage.output_tokens == 16
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert whole._request_id and whole._request_id.startswith("req_")
    counted = client.messages.count_tokens(model="tiny", messages=MESSAGES, system="Be brief.").input_tokens
    for usage in (whole.usage, final.usage):
        assert usage.input_tokens + usage.cache_read_input_tokens == counted


def test_the_cache_a_stop_sequence_and_the_end_of_the_context_are_told(client: anthropic.Anthropic) -> None:
    long = [{"role": "user", "content": "One day a little girl went to the park with her dog and her mother. " * 4}]
    warm = client.messages.create(messages=long, **{**GREEDY, "max_tokens": 0})
    assert warm.content == [] and warm.usage.cache_read_input_tokens == 0
    assert client.messages.create(messages=long, **GREEDY).usage.cache_read_input_tokens > 16
    text = client.messages.create(messages=MESSAGES, **GREEDY).content[0].text
    stop = text[len(text) // 2 :][:5]
    stopped = client.messages.create(messages=MESSAGES, stop_sequences=[stop, "never said"], **GREEDY)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert stopped.content[0].text == text[: text.index(stop)]
    begun = {"role": "assistant", "content": text[: len(text) // 2].rstrip()}
    assert client.messages.create(messages=[*MESSAGES, begun], **GREEDY).content[0].text.strip()


def test_a_tools_round_trip(client: anthropic.Anthropic) -> None:
    options = {**GREEDY, "max_tokens": 40, "tools": [WEATHER]}
    called = client.messages.create(messages=[IN_PARIS], **options)
    (call,) = called.content
    assert (call.type, call.name, call.input, called.stop_reason) == ("tool_use", "get_weather", {"city": "Paris"}, "tool_use")
    with client.messages.stream(messages=[IN_PARIS], **options) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        assert stream.get_final_message().content[0].input == {"city": "Paris"} and len(pieces) > 2
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "42"}]}
    answer = client.messages.create(messages=[IN_PARIS, called.to_param(), result], **options)
    assert answer.content[0].text == "The result is 42." and answer.stop_reason == "end_turn"
    forced = client.messages.create(messages=MESSAGES, **options, tool_choice={"type": "tool", "name": "get_weather"})
    assert forced.content[0].name == "get_weather"


def test_the_packages_tool_runner_and_parse(client: anthropic.Anthropic) -> None:
    asked = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Get the weather of a city."""
        asked.append(city)
        return "42"

    runner = client.beta.messages.tool_runner(messages=[IN_PARIS], tools=[get_weather], **{**GREEDY, "max_tokens": 40})
    assert runner.until_done().content[0].text == "The result is 42." and asked == ["Paris"]

    class Answer(pydantic.BaseModel):
        yes: bool

    parsed = client.messages.parse(messages=MESSAGES, output_format=Answer, **{**GREEDY, "max_tokens": 40})
    assert isinstance(parsed.parsed_output, Answer)
    with client.messages.stream(messages=MESSAGES, output_format=Answer, **{**GREEDY, "max_tokens": 40}) as stream:
        assert stream.get_final_message().parsed_output == parsed.parsed_output


def test_errors_are_exceptions_of_the_right_kind(client: anthropic.Anthropic) -> None:
    create = client.messages.create
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(messages=MESSAGES, **GREEDY)
    with pytest.raises(anthropic.NotFoundError, match="model"):
        create(messages=MESSAGES, **{**GREEDY, "model": "claude"})
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long") as caught:
        create(messages=[{"role": "user", "content": "word " * 400}], **GREEDY)
    assert caught.value.type == "invalid_request_error" and caught.value.request_id.startswith("req_")
    with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format"):
        create(messages=MESSAGES, output_config={"format": {"type": "json_schema", "schema": {"type": "no such"}}}, **GREEDY)
    # this model does not reason, and thinking is taken all the same
    assert create(messages=MESSAGES, thinking={"type": "enabled", "budget_tokens": 10}, **GREEDY).content
    assert create(messages=MESSAGES, thinking={"type": "adaptive"}, **GREEDY).content  # and it goes on


def test_a_bearer_token_and_asyncio(client: anthropic.Anthropic) -> None:
    async def main() -> str:
        options = {"base_url": client.base_url, "api_key": None, "auth_token": KEY, "max_retries": 0}
        async with (
            anthropic.AsyncAnthropic(**options) as other,
            other.messages.stream(messages=MESSAGES, **GREEDY) as stream,
        ):
            return await stream.get_final_text()

    assert asyncio.run(main()) == client.messages.create(messages=MESSAGES, **GREEDY).content[0].text

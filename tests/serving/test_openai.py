"""The `openai` package against `quire serve` with the bundled model: what a user of it can see."""

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from deadlines import DEADLINE_S
from serving import SMALL, Served

openai = pytest.importorskip("openai")

KEY = "secret"
MESSAGES = [{"role": "user", "content": "Tell me about a dog."}]
GREEDY = {"model": "tiny", "temperature": 0.0, "max_tokens": 16}


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with Served(*SMALL, "--api-key", KEY, "--served-model-name", "tiny", "--max-model-len", "256") as served:
        served.ready()
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0, timeout=DEADLINE_S) as client:
            yield client
        assert served.end() == 0


def test_a_streamed_chat_says_what_one_in_a_piece_says(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=MESSAGES, **GREEDY)
    assert whole.object == "chat.completion" and whole.model == "tiny" and whole.id.startswith("chatcmpl-")
    message, text, usage, roles, reasons = whole.choices[0].message, "", None, [], []
    options = {"stream": True, "stream_options": {"include_usage": True}}
    for chunk in client.chat.completions.create(messages=MESSAGES, **GREEDY, **options):
        assert chunk.object == "chat.completion.chunk"
        usage = chunk.usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            roles += [choice.delta.role] if choice.delta.role else []
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert message.role == "assistant" and message.content == text and len(text) > 10
    assert roles == ["assistant"] and reasons == [whole.choices[0].finish_reason]
    assert usage is not None and whole.usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


def test_completions_whole_streamed_and_many(client: openai.OpenAI) -> None:
    prompts = ["Once upon a time", "The cat", "A dog and a bird"]
    alone = [client.completions.create(prompt=p, **GREEDY).choices[0] for p in prompts]
    together = client.completions.create(prompt=prompts, **GREEDY)
    assert [c.text for c in together.choices] == [c.text for c in alone] and len({c.text for c in alone}) == 3
    assert [c.index for c in together.choices] == [0, 1, 2]
    texts = ["", "", ""]
    for chunk in client.completions.create(prompt=prompts, **GREEDY, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [c.text for c in alone]
    echoed = client.completions.create(prompt=prompts[0], **GREEDY, echo=True).choices[0]
    assert echoed.text == prompts[0] + alone[0].text
    assert alone[0].finish_reason == "length"


def test_usage_counts_tokens_and_those_found_in_the_cache(client: openai.OpenAI) -> None:
    prompt = "One day a little girl went to the park with her dog and her mother. " * 4
    to_the_end = {"extra_body": {"ignore_eos": True}}
    first, second = (client.completions.create(prompt=prompt, **GREEDY, **to_the_end) for _ in range(2))
    assert first.usage is not None and second.usage is not None
    assert first.usage.completion_tokens == 16 and first.usage.total_tokens == first.usage.prompt_tokens + 16
    assert first.usage.prompt_tokens_details is not None and second.usage.prompt_tokens_details is not None
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached is not None and second.usage.prompt_tokens - 16 <= cached < second.usage.prompt_tokens
    assert first.choices[0].text == second.choices[0].text


def test_n_samples_differ_and_a_seed_repeats_them(client: openai.OpenAI) -> None:
    options = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12, "temperature": 1.0, "n": 4, "seed": 7}
    first, second = (client.chat.completions.create(**options) for _ in range(2))
    texts = [c.message.content for c in first.choices]
    assert [c.index for c in first.choices] == [0, 1, 2, 3] and len(set(texts)) > 1
    assert texts == [c.message.content for c in second.choices]
    assert first.usage is not None and first.usage.completion_tokens <= 4 * 12
    streamed = ["", "", "", ""]
    for chunk in client.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_stop_strings_are_cut_off_streamed_or_not(client: openai.OpenAI) -> None:
    text = client.completions.create(prompt="Once upon a time", **GREEDY).choices[0].text
    stop = text[len(text) // 2 :][:5]
    whole = client.completions.create(prompt="Once upon a time", **GREEDY, stop=[stop, "never said"]).choices[0]
    assert whole.text == text[: text.index(stop)] and whole.finish_reason == "stop"
    chunks = list(client.completions.create(prompt="Once upon a time", **GREEDY, stop=stop, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == whole.text
    assert chunks[-1].choices[0].finish_reason == "stop"


Row = tuple[str, float, dict[str, float]]  # of one position: its token, that one's logprob, and the most likely tokens


def completion_rows(choice: Any) -> list[Row]:
    p = choice.logprobs
    rows = list(zip(p.tokens, p.token_logprobs, p.top_logprobs, strict=True))
    return rows[1:] if p.token_logprobs[0] is None else rows  # a prompt's first token has none


def chat_rows(choice: Any) -> list[Row]:
    return [(t.token, t.logprob, {top.token: top.logprob for top in t.top_logprobs}) for t in choice.logprobs.content]


def assert_same(rows: list[Row], expected: list[Row]) -> None:
    assert [token for token, _, _ in rows] == [token for token, _, _ in expected]
    for (_, logprob, top), (_, expected_logprob, expected_top) in zip(rows, expected, strict=True):
        assert math.isclose(logprob, expected_logprob, abs_tol=1e-4)
        assert top == pytest.approx(expected_top, abs=1e-4)


def test_each_rows_logprobs_are_its_own(client: openai.OpenAI) -> None:
    """Rows of one step, sampled tokens that are not always the likeliest, against the same tokens as prompts, one at a time:
    another row's numbers, or the right ones beside other ids, would differ."""
    extra = {"return_token_ids": True, "ignore_eos": True}
    sampled = {"model": "tiny", "temperature": 1.0, "max_tokens": 12, "logprobs": 3, "extra_body": extra}
    ask = client.completions.create
    prompts = ["Once upon a time", "The cat", "A dog and a bird"]
    choices = ask(prompt=prompts, **sampled, seed=7, n=2, echo=True).choices
    assert len(choices) == 6 and len({c.text for c in choices}) == 6
    surprises = 0
    for choice in choices:
        ids = [*choice.prompt_token_ids, *choice.token_ids]
        alone = ask(model="tiny", prompt=ids, max_tokens=0, echo=True, logprobs=3).choices[0]
        assert_same(completion_rows(choice), completion_rows(alone))
        surprises += sum(logprob < max(top.values()) for _, logprob, top in completion_rows(choice)[-12:])
    assert surprises >= 6  # so that a token's own number is not always the first of the likeliest

    chat = {"messages": MESSAGES, "model": "tiny", "temperature": 1.0, "max_tokens": 12, "seed": 7}
    both = client.chat.completions.create(**chat, n=2, logprobs=True, top_logprobs=3).choices
    assert both[0].message.content != both[1].message.content
    for i, choice in enumerate(both):
        alone = client.chat.completions.create(**{**chat, "seed": 7 + i}, logprobs=True, top_logprobs=3).choices[0]
        assert_same(chat_rows(choice), chat_rows(alone))
        for token, logprob, top in chat_rows(choice):
            assert list(top.values()) == sorted(top.values(), reverse=True)
            assert math.isclose(logprob, top[token], abs_tol=1e-6) if token in top else logprob <= min(top.values())
    assert any(logprob < max(top.values()) for choice in both for _, logprob, top in chat_rows(choice))


def test_logprobs_of_both_routes(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(messages=MESSAGES, **GREEDY, logprobs=True, top_logprobs=3).choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert "".join(t.token for t in choice.logprobs.content) == choice.message.content
    for token in choice.logprobs.content:  # greedy: the token is the best of the three
        assert token.token == token.top_logprobs[0].token and len(token.top_logprobs) == 3
        assert math.isclose(token.logprob, token.top_logprobs[0].logprob, abs_tol=1e-5) and token.logprob <= 0.0
    legacy = client.completions.create(prompt="The cat", **GREEDY, logprobs=2, echo=True).choices[0]
    assert legacy.logprobs is not None and legacy.logprobs.tokens is not None
    assert legacy.logprobs.token_logprobs is not None and legacy.logprobs.text_offset is not None
    assert legacy.logprobs.token_logprobs[0] is None and all(x <= 0 for x in legacy.logprobs.token_logprobs[1:])  # type: ignore[operator]
    assert legacy.logprobs.text_offset[0] == 0 and len(legacy.logprobs.tokens) == len(legacy.logprobs.token_logprobs)


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_errors_are_exceptions_of_the_right_kind(client: openai.OpenAI) -> None:
    create = client.chat.completions.create
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").chat.completions.create(messages=MESSAGES, **GREEDY)
    with pytest.raises(openai.NotFoundError, match="model"):
        create(model="gpt-4", messages=MESSAGES)
    for field, value in {"temperature": -1.0, "top_p": 2.0, "n": 0, "presence_penalty": 3.0, "max_tokens": 0}.items():
        with pytest.raises(openai.BadRequestError, match=field) as caught:
            create(**{"model": "tiny", "messages": MESSAGES, field: value})
        assert caught.value.param == field
    with pytest.raises(openai.BadRequestError) as caught:
        create(messages=[{"role": "user", "content": "word " * 400}], **GREEDY)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="response_format"):
        create(messages=MESSAGES, response_format={"type": "json"}, **GREEDY)  # type: ignore[typeddict-item]
    impossible = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no such type"}}}
    with pytest.raises(openai.BadRequestError):
        create(messages=MESSAGES, response_format=impossible, **GREEDY)  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError):
        create(messages=[], **GREEDY)
    assert create(messages=MESSAGES, **GREEDY).choices[0].message.content  # and it goes on


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
IN_PARIS = {"role": "user", "content": "What is the weather in Paris?"}


def test_the_bundled_model_calls_functions(client: openai.OpenAI) -> None:
    """And speaks of what came back."""
    options = {**GREEDY, "max_tokens": 40, "tools": [WEATHER]}
    choice = client.chat.completions.create(messages=[IN_PARIS], **options).choices[0]
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
        "function",
        "get_weather",
        {"city": "Paris"},
    )
    assert choice.message.content is None and choice.finish_reason == "tool_calls"
    history = [IN_PARIS, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "42"}]
    answer = client.chat.completions.create(messages=history, **options).choices[0]
    assert answer.message.content == "The result is 42." and not answer.message.tool_calls and answer.finish_reason == "stop"
    other = client.chat.completions.create(messages=[{"role": "user", "content": "Add 3 and 5"}], **options).choices[0]
    assert other.message.content == "8" and not other.message.tool_calls
    silent = client.chat.completions.create(messages=[IN_PARIS], **options, tool_choice="none").choices[0]
    assert silent.message.content and not silent.message.tool_calls


def test_the_bundled_model_speaks_of_the_results_of_two_calls(client: openai.OpenAI) -> None:
    options = {**GREEDY, "max_tokens": 64, "tools": [WEATHER]}
    asked = {"role": "user", "content": "What is the weather in Paris and in Rome?"}
    message = client.chat.completions.create(messages=[asked], **options).choices[0].message
    assert [json.loads(call.function.arguments) for call in message.tool_calls] == [{"city": "Paris"}, {"city": "Rome"}]
    contents = dict(zip((call.id for call in message.tool_calls), ("42", "17"), strict=True))
    results = [{"role": "tool", "tool_call_id": call_id, "content": content} for call_id, content in contents.items()]
    answer = client.chat.completions.create(messages=[asked, message, *results], **{**options, "max_tokens": 32}).choices[0]
    assert answer.message.content == "The results are 42 and 17." and not answer.message.tool_calls


def test_calls_stream_into_the_clients_own_helpers(client: openai.OpenAI) -> None:
    options = {**GREEDY, "max_tokens": 40, "tools": [WEATHER]}
    with client.chat.completions.stream(messages=[IN_PARIS], **options) as stream:
        deltas = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
        choice = stream.get_final_completion().choices[0]
    (call,) = choice.message.tool_calls
    assert json.loads("".join(deltas)) == json.loads(call.function.arguments) == {"city": "Paris"} and len(deltas) > 2
    assert choice.finish_reason == "tool_calls" and choice.message.content is None and call.function.name == "get_weather"

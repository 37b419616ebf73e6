"""gpt-oss's format through the routes: what its template gets, what the engine is asked for, and what comes back."""

import asyncio
import json

import fake_client as http
import msgspec
import pytest
from fake_client import CHAT, HELLO
from harmony_cases import MARKERS, harmony_tokenizer, ids_of
from harmony_template import TEMPLATE
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from responses_cases import both

from quire.frontend.client.outputs import Delta
from quire.frontend.http.api.output_plan import ParserNames
from quire.frontend.text.detokenizer import OutputText
from quire.frontend.text.tokenizer import Tokenizer

MESSAGES = "/v1/messages"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
THOUGHT = ["<|channel|>", "analysis", "<|message|>", "hm ✓", "<|end|>", "<|start|>", "assistant"]
FINAL = ["<|channel|>", "final", "<|message|>", "Hello <|end|>!", "<|return|>"]
CALL = [
    "<|channel|>",
    "commentary",
    " to=functions.weather ",
    "<|constrain|>",
    "json",
    "<|message|>",
    '{"city": "Bonn"}',
    "<|call|>",
]
ENDS = ("<|return|>", "<|call|>")


def api_of(pieces, names=None, template=TEMPLATE):
    """An Api whose engine says these tokens, as the real client shows them: the last one is a stop token."""
    client = http.FakeClient(template=template)
    client.tokenizer = Tokenizer(harmony_tokenizer(), {"eos_token": "<|return|>"}, {"default": template})
    limits = msgspec.structs.replace(client.welcome.limits, max_model_len=4000)
    client.welcome = msgspec.structs.replace(client.welcome, limits=limits)

    def speak(stream):
        stream.num_cached_tokens = 4
        texts = [OutputText(client.tokenizer, stream.params) for _ in range(stream.params.n)]
        ids = ids_of(pieces)
        for num_tokens, token in enumerate(ids, 1):
            end = "stop" if num_tokens == len(ids) else None
            for i, text in enumerate(texts):
                text.mark(stream.marks)
                piece = text.push([token], end is not None, end is not None and pieces[-1] in ENDS)
                stream.push(Delta(i, piece, [token], None, end, None, num_tokens))
        stream.end()

    def slowly(stream):  # the route marks tokens after it has submitted
        asyncio.get_running_loop().call_soon(speak, stream)

    client.speak = slowly
    return http.Api(client) if names is None else http.Api(client, parsers=names)


def prompt_of(api):
    return api.client.tokenizer.decode(api.client.streams[-1].ids, skip_special_tokens=False)


async def chat(api, body):
    """The first choice of an answer in one piece and of a stream, which must be alike."""
    status, answer = await api.json("POST", CHAT, {**HELLO, **body})
    assert status == 200, answer
    whole = ChatCompletion.model_validate(answer).choices[0]
    state = ChatCompletionStreamState()
    for event in await api.events(CHAT, {**HELLO, **body}):
        if event != "[DONE]":
            state.handle_chunk(ChatCompletionChunk.model_validate(event))
    streamed = state.get_final_completion().choices[0]
    assert whole.finish_reason == streamed.finish_reason
    assert (whole.message.content or None) == (streamed.message.content or None)
    assert getattr(whole.message, "reasoning", None) == getattr(streamed.message, "reasoning", None)
    calls = [[(c.function.name, c.function.arguments) for c in m.tool_calls or []] for m in (whole.message, streamed.message)]
    assert calls[0] == calls[1]
    return answer, calls[0]


def test_chats():
    async def main():
        answer, calls = await chat(api := api_of(THOUGHT + FINAL), {"reasoning_effort": "high"})
        message = answer["choices"][0]["message"]
        assert (message["content"], message["reasoning"], calls) == ("Hello <|end|>!", "hm ✓", [])
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(ids_of(THOUGHT[:5]))
        assert prompt_of(api) == (
            "<|start|>system<|message|>Reasoning: high<|end|><|start|>user<|message|>hi<|end|><|start|>assistant"
        )
        assert api.client.streams[-1].params.structured_outputs is None
        answer, calls = await chat(api := api_of(THOUGHT + CALL), {"tools": [WEATHER], "reasoning_effort": "minimal"})
        assert calls == [("weather", '{"city": "Bonn"}')] and answer["choices"][0]["finish_reason"] == "tool_calls"
        assert answer["choices"][0]["message"]["content"] is None
        assert "Reasoning: low" in prompt_of(api) and "//  type weather;" in prompt_of(api)
        answer, calls = await chat(api_of(CALL), {})  # it has no tools
        assert answer["choices"][0]["message"]["content"] == '{"city": "Bonn"}' and not calls
        answer, _ = await chat(api_of(FINAL), {})
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0

    asyncio.run(main())


def test_a_history_with_calls():
    async def main():
        call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
        history = [
            {"role": "system", "content": "S"}, {"role": "developer", "content": "D"}, {"role": "user", "content": "u"},
            {"role": "assistant", "content": "I look.", "reasoning": "hm", "tool_calls": [call, {**call, "id": "c2"}]},
            {"role": "tool", "tool_call_id": "c1", "content": "rain"}, {"role": "tool", "tool_call_id": "c2", "content": "sun"},
        ]  # fmt: skip
        await chat(api := api_of(FINAL), {"messages": history, "tools": [WEATHER]})
        shown = '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"city": "Bonn"}<|call|>'
        result = '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"%s"<|end|>'
        assert prompt_of(api).endswith(
            "<|start|>developer<|message|># Instructions S\n\nD//  type weather;<|end|><|start|>user<|message|>u<|end|>"
            "<|start|>assistant<|channel|>analysis<|message|>hm\nI look.<|end|>"
            f"{shown}{result % 'rain'}{shown}{result % 'sun'}<|start|>assistant"
        )
        begun = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "Once"}]
        api = api_of([" upon", "<|return|>"])
        answer, _ = await chat(api, {"messages": begun, "continue_final_message": True})
        assert answer["choices"][0]["message"]["content"] == " upon"
        assert prompt_of(api).endswith("<|start|>assistant<|channel|>final<|message|>Once")

    asyncio.run(main())


@pytest.mark.parametrize(
    "names", [ParserNames("openai", "openai_gptoss"), ParserNames("auto", "gpt_oss"), ParserNames("openai")]
)
def test_vllms_names_are_taken(names):
    async def main():
        answer, _ = await chat(api_of(THOUGHT + FINAL, names, http.TEMPLATE), {})
        assert answer["choices"][0]["message"]["reasoning"] == "hm ✓"

    asyncio.run(main())


def test_without_parsers_the_text_is_as_it_is():
    async def main():
        answer, _ = await chat(api_of(THOUGHT + FINAL, ParserNames("none", "none")), {})
        assert answer["choices"][0]["message"]["content"] == "analysishm ✓assistantfinalHello <|end|>!"

    asyncio.run(main())


def test_responses():
    async def main():
        api = api_of(THOUGHT + CALL)
        tool = {"type": "function", **WEATHER["function"]}
        answer, _ = await both(api, {"input": "hi", "instructions": "S", "tools": [tool], "reasoning": {"effort": "low"}})
        thought, call = answer["output"]
        assert thought["content"][0]["text"] == "hm ✓" and call["arguments"] == '{"city": "Bonn"}'
        assert "Reasoning: low" in prompt_of(api) and "# Instructions S" in prompt_of(api)
        await api.services.storage.close()

    asyncio.run(main())


def test_messages():
    async def main():
        api = api_of(THOUGHT + FINAL)
        body = {"model": "tiny", "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}]}
        for thinking in ({"type": "enabled", "budget_tokens": 9}, {"type": "adaptive"}, {"type": "disabled"}):
            status, answer = await api.json("POST", MESSAGES, {**body, "thinking": thinking})
            assert status == 200, answer
            assert [block["type"] for block in answer["content"]] == ["thinking", "text"]
        params = api.client.streams[0].params
        assert (params.thinking_token_budget, params.reasoning_end_token_ids) == (9, ids_of(["<|end|>"]))
        assert params.reasoning_start_token_ids == ids_of(["<|channel|>", "analysis", "<|message|>"])
        assert api.client.streams[-1].params.thinking_token_budget is None

    asyncio.run(main())


def test_formats_are_of_the_answer_alone():
    async def main():
        api = api_of(THOUGHT + FINAL)
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        format = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        for body, there, not_there in (
            ({"response_format": format}, ["final<|message|>", "analysis", "response_format"], ["functions."]),
            ({"response_format": format, "tools": [WEATHER]}, ["final<|message|>", "functions.weather"], []),
            ({"tools": [WEATHER], "tool_choice": "required"}, ["functions.weather", "city"], ["final<|message|>"]),
            ({"structured_outputs": {"regex": "a|b"}}, ['"pattern":"a|b"', "final<|message|>"], []),
        ):
            status, answer = await api.json("POST", CHAT, {**HELLO, **body})
            assert status == 200, answer
            wanted = api.client.streams[-1].params.structured_outputs
            assert wanted.kind == "structural_tag" and json.loads(wanted.text)["special_only"]
            assert all(text in wanted.text for text in there) and not any(text in wanted.text for text in not_there)
        wrong = {"tools": [WEATHER], "tool_choice": "required", "structured_outputs": {"regex": "a"}}
        assert (await api.json("POST", CHAT, {**HELLO, **wrong}))[0] == 400
        begun = {"messages": [*HELLO["messages"], {"role": "assistant", "content": "a"}], "continue_final_message": True}
        assert (await api.json("POST", CHAT, {**begun, "tools": [WEATHER], "tool_choice": "required"}))[0] == 400
        assert (await api.json("POST", CHAT, {**begun, "structured_outputs": {"regex": "a"}}))[0] == 200
        assert api.client.streams[-1].params.structured_outputs.kind == "regex"
        assert set(api.client.streams[-1].marks) == {harmony_tokenizer().token_to_id(marker) for marker in MARKERS}

    asyncio.run(main())

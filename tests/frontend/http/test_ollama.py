"""Ollama's routes over the real application: answers in one piece, and streams that must say the same."""

import asyncio
import json

import fake_client as http
import pytest
from messages_cases import ONE, QWEN3, SAID, THOUGHT, TWO, api_of, chat_of, params_of, run

from quire.frontend.client.outputs import Delta
from quire.frontend.client.stream import EngineError
from quire.frontend.http.api.bodies.checked import RequestDefaults
from quire.frontend.http.protocol.cors import Cors
from quire.ipc.sampling import RequestOutputKind

CHAT, GENERATE = "/api/chat", "/api/generate"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = {**SAID, "tools": [WEATHER, CLOCK]}
TIMES = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


async def lines_of(api, path, body) -> list[dict]:
    answer = await api.ask("POST", path, body)
    assert answer.status == 200 and answer.headers["content-type"] == "application/x-ndjson", answer
    assert answer.body.endswith(b"\n")
    return [json.loads(line) for line in answer.body.decode().removesuffix("\n").split("\n")]


def summed(lines: list[dict], is_chat: bool) -> dict:
    """What a client makes of a stream: its last line, with the texts and calls of all."""
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    parts = [line["message"] if is_chat else line for line in lines]
    total = dict(lines[-1]["message"] if is_chat else lines[-1])
    for name in ("content", "response", "thinking"):
        if text := "".join(part.get(name, "") for part in parts):
            total[name] = text
    if calls := [call for part in parts for call in part.get("tool_calls", ())]:
        total["tool_calls"] = calls
    return {**lines[-1], "message": total} if is_chat else total


def plain(answer: dict) -> dict:
    """An answer without times and made-up ids."""
    for call in answer.get("message", {}).get("tool_calls", ()):
        assert call.pop("id")
    return {name: value for name, value in answer.items() if name not in ("created_at", *TIMES)}


async def both(api, path, body) -> dict:
    """An answer in one piece and a stream, which must be alike; the engine is told which of them it makes."""
    status, whole = await api.json("POST", path, {**body, "stream": False})
    assert status == 200, whole
    assert params_of(api).output_kind is RequestOutputKind.FINAL_ONLY
    assert all(isinstance(whole[name], int) and whole[name] >= (name != "load_duration") for name in TIMES)
    lines = await lines_of(api, path, body)
    assert plain(summed(lines, path == CHAT)) == plain(whole)
    return whole


@pytest.mark.parametrize("name", ["tiny", "tiny:latest", "org/tiny:latest", None])
def test_a_chat_and_a_prompt_in_ollamas_shape(name):
    async def main():
        api = http.Api()
        whole = await both(api, CHAT, {**SAID, "model": name})
        assert whole["message"] == {"role": "assistant", "content": http.FakeClient.OUTPUT}
        assert (whole["model"], whole["done"], whole["done_reason"]) == (name or "tiny", True, "stop")
        assert whole["created_at"].endswith("Z")
        assert (whole["prompt_eval_count"], whole["eval_count"]) == (len(api.client.streams[-1].ids), http.NUM_TOKENS)
        whole = await both(api, GENERATE, {"prompt": "hi", "system": "Be kind.", "model": name})
        assert whole["response"] == http.FakeClient.OUTPUT and "thinking" not in whole and whole["done"]
        assert chat_of(api) == "<system>Be kind.<user>hi<assistant>"
        await both(api, GENERATE, {"prompt": "as it is", "raw": True, "model": name})
        assert chat_of(api) == "as it is"

    run(main)


def test_a_stream_goes_out_as_it_comes_and_fails_with_a_line():
    async def main():
        api = http.Api()
        api.client.speak = None
        asking = asyncio.create_task(api.ask("POST", CHAT, SAID))
        await api.client.until(lambda: api.client.streams)
        (stream,) = api.client.streams
        assert stream.params.output_kind is not RequestOutputKind.FINAL_ONLY
        stream.push(Delta(0, "a", [1], num_tokens=1))
        stream.end(EngineError("x"))
        answer = await asking
        first, last = [json.loads(line) for line in answer.body.splitlines()]
        assert first["message"]["content"] == "a" and last == {"error": "The engine failed while it ran this request."}
        await api.ask("POST", CHAT, {**SAID, "stream": True, "model": "nothing"})
        assert len(api.client.streams) == 1

    run(main)


# --------------------------------------------------------------------------------------------------------------- options
def test_options_become_sampling_params():
    options = {
        "num_predict": 9,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 42,
        "stop": ["x"],
        "repeat_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "num_ctx": 4096,
        "numa": False,
    }

    async def main():
        api = http.Api()
        for path, body in ((CHAT, SAID), (GENERATE, {"prompt": "a"}), (GENERATE, {"prompt": "a", "raw": True})):
            await both(api, path, {**body, "options": options, "keep_alive": "5m"})
            p = params_of(api)
            assert (p.max_tokens, p.temperature, p.top_k, p.top_p, p.min_p, p.seed) == (9, 0.5, 7, 0.9, 0.1, 42)
            assert (p.stop, p.repetition_penalty, p.presence_penalty, p.frequency_penalty) == (["x"], 1.1, 0.5, 0.25)
            for num_predict in (-1, -2, 0, 1_000_000):
                await both(api, path, {**body, "options": {"num_predict": num_predict, "seed": -1}})
                p, room = params_of(api), api.client.welcome.limits.max_model_len - len(api.client.streams[-1].ids)
                assert p.seed is None and p.max_tokens in (None, room)

    run(main)


def test_a_cut_answer_says_so():
    async def main():
        api = http.Api()
        api.client.speak = lambda stream: (stream.push(Delta(0, "a", [1], None, "length", None, 1)), stream.end())
        assert (await both(api, CHAT, {**SAID, "options": {"num_predict": 1}}))["done_reason"] == "length"

    run(main)


@pytest.mark.parametrize("path", [CHAT, GENERATE])
def test_format_is_json_or_a_schema(path):
    async def main():
        api, base = http.Api(), {**SAID} if path == CHAT else {"prompt": "a"}
        schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
        for given in ("json", schema, "", None):
            await both(api, path, {**base, "format": given})
            wanted = params_of(api).structured_outputs
            assert (wanted is None) == (not given)
            assert not isinstance(given, dict) or "age" in str(wanted)
        status, answer = await api.json("POST", path, {**base, "format": "yaml"})
        assert (status, answer) == (400, {"error": 'format must be "json" or a JSON Schema.'})

    run(main)


# ------------------------------------------------------------------------------------------------------ tools and thinking
@pytest.mark.parametrize(
    ("output", "text", "calls"),
    [
        (ONE, "", [("weather", {"city": "Bonn ✓"})]),
        ("Let me see.\n" + ONE, "Let me see.\n", [("weather", {"city": "Bonn ✓"})]),
        (TWO, "", [("weather", {"city": "Bonn ✓"}), ("clock", {})]),
        ('<tool_call>\n{"name": "clock", "arguments": {"x": [1, 2', "", [("clock", {"x": [1, 2]})]),
        ("It is noon.", "It is noon.", []),
    ],
)
def test_calls_are_whole_and_numbered(output, text, calls):
    async def main():
        message = (await both(api_of(output=output), CHAT, TOOLS))["message"]
        functions = [call["function"] for call in message.get("tool_calls", ())]
        assert [(f["name"], f["arguments"]) for f in functions] == calls and message["content"] == text
        assert [f["index"] for f in functions] == list(range(len(calls)))

    run(main)


def test_a_conversation_with_calls_and_results():
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% for c in m.tool_calls or [] %}[{{ c.id }} {{ c.function.name }} {{ c.function.arguments.city }}]{% endfor %}"
        "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
        "{% if m.role == 'tool' %}[{{ m.tool_call_id }} {{ m.name }}]{% endif %}{% endfor %}"
    )
    call = {"function": {"name": "weather", "arguments": {"city": "Bonn"}}}
    clock = {"function": {"name": "clock"}, "id": "mine"}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [call, call, clock]},
        {"role": "tool", "content": "8", "tool_call_id": "mine"},
        {"role": "tool", "content": "1", "tool_name": "weather"},
        {"role": "tool", "content": "2"},
    ]

    async def main():
        api = api_of(template, "So.")
        await both(api, CHAT, {"messages": messages})
        assert chat_of(api) == (
            "<user>hi<assistant>[call00001 weather Bonn][call00002 weather Bonn][mine clock ](hm)"
            "<tool>8[mine clock]<tool>1[call00001 weather]<tool>2[call00002 weather]"
        )
        api = api_of(output="go.")
        await both(api, CHAT, {"messages": [messages[0], {"role": "assistant", "content": "Let us"}]})
        assert chat_of(api).endswith("<assistant>Let us")  # continued

    run(main)


def test_thinking_is_apart_and_may_be_switched():
    async def main():
        api = api_of(QWEN3, THOUGHT + "Yes.", special=("</think>",))
        for path, body in ((CHAT, SAID), (GENERATE, {"prompt": "hi"})):
            whole = await both(api, path, {**body, "think": True})
            said = whole.get("message", whole)
            assert said["thinking"] == "\nhm\n" and (said.get("content") or said["response"]).strip() == "Yes."
            assert not chat_of(api).endswith("</think>")
            whole = await both(api, path, {**body, "think": False})
            assert "thinking" not in whole.get("message", whole) and chat_of(api).endswith("<think></think>")
            await both(api, path, {**body, "think": "low"})
        own = api_of(QWEN3, "Yes.", defaults=RequestDefaults(chat_template_kwargs={"enable_thinking": False}))
        await both(own, CHAT, {**SAID, "think": "high"})
        assert not chat_of(own).endswith("</think>")

    run(main)


# ---------------------------------------------------------------------------------------------------- models, and the rest
def test_the_served_model_is_described():
    async def main():
        api = api_of(QWEN3)
        for path in ("/api/tags", "/api/ps"):
            _, answer = await api.json("GET", path)
            assert [model["name"] for model in answer["models"]] == ["tiny", "org/tiny"]
        for body in ({"model": "tiny:latest"}, {"name": "tiny"}):
            _, answer = await api.json("POST", "/api/show", body)
            assert answer["capabilities"] == ["completion", "tools", "thinking"] and answer["template"] == QWEN3
            info = answer["model_info"]
            assert info[f"{info['general.architecture']}.context_length"] == 200
        _, answer = await http.Api().json("POST", "/api/show", {})
        assert answer["capabilities"] == ["completion"]
        _, answer = await api.json("GET", "/api/version")
        assert tuple(map(int, answer["version"].split("."))) >= (0, 6, 4)  # the oldest that editors take
        assert (await api.ask("HEAD", "/")).status == 200 == (await api.ask("HEAD", "/api/version")).status

    run(main)


def test_a_request_without_a_prompt_loads():
    async def main():
        api = http.Api()
        for path, body in ((CHAT, {"messages": []}), (CHAT, {}), (GENERATE, {}), (GENERATE, {"prompt": ""})):
            status, answer = await api.json("POST", path, body)
            assert (status, answer["done"], answer["done_reason"]) == (200, True, "load")
            assert (answer["message"]["content"] if path == CHAT else answer["response"]) == ""
            _, answer = await api.json("POST", path, {**body, "keep_alive": 0})
            assert answer["done_reason"] == "unload"
        assert not api.client.streams

    run(main)


def test_a_body_needs_no_content_type_but_a_page_of_an_allowed_origin():
    async def main():
        api, body = http.Api(), json.dumps({**SAID, "stream": False}).encode()
        form = {"Content-Type": "application/x-www-form-urlencoded"}
        assert (await api.ask("POST", CHAT, body, form)).status == 200  # curl -d
        own = http.Api(cors=Cors(["https://a.example"]))
        assert (await own.ask("POST", CHAT, body, {**form, "Origin": "https://b.example"})).status == 403
        assert (await own.ask("POST", CHAT, body, {**form, "Origin": "https://a.example"})).status == 200

    run(main)


def test_errors_have_ollamas_form():
    async def main():
        api = http.Api(api_keys=["k"])
        key = {"Authorization": "Bearer k"}
        image = {"messages": [{"role": "user", "content": "hi", "images": ["iVBO"]}]}
        cases = [
            ("POST", CHAT, SAID, {}, 401, "API key"),
            ("GET", "/api/tags", None, {}, 401, "API key"),
            ("POST", CHAT, {**SAID, "model": "no:latest"}, key, 404, "model 'no:latest' not found"),
            ("GET", "/api/nothing", None, key, 404, "no such path"),
            ("GET", CHAT, None, key, 405, "POST"),
            ("POST", CHAT, b"{", key, 400, "JSON"),
            ("POST", CHAT, image, key, 400, "messages[0].images"),
            ("POST", CHAT, TOOLS, key, 400, "tools"),
            ("POST", CHAT, {**SAID, "options": {"temperature": -1}}, key, 400, "options.temperature"),
            ("POST", CHAT, {**SAID, "options": {"repeat_penalty": -1}}, key, 400, "options.repeat_penalty"),
            *(
                ("POST", GENERATE, {"prompt": "a", name: ["x"]}, key, 400, name)
                for name in ("suffix", "images", "template", "context", "logprobs", "top_logprobs")
            ),
            ("POST", "/api/embed", {"input": "x"}, key, 400, "cannot make vectors"),
            ("POST", "/api/embeddings", {"prompt": "x"}, key, 400, "cannot make vectors"),
            *(
                ("POST", f"/api/{name}", {"model": "x"}, key, 501, "quire serve")
                for name in ("pull", "push", "create", "copy", "blobs/sha256:0")
            ),
            ("DELETE", "/api/delete", {"model": "x"}, key, 501, "quire serve"),
        ]
        for method, path, body, headers, status, text in cases:
            got, answer = await api.json(method, path, body, headers)
            assert (got, list(answer)) == (status, ["error"]) and text in answer["error"], (path, body, answer)
        assert not api.client.streams

    run(main)

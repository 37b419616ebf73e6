"""Fields of both routes beyond the sampler's: each does what the table of fields says, and liberties are those of pydantic."""

import asyncio
import logging

import fake_client as http
import openai
import pytest
from fake_client import CHAT, COMPLETIONS, HELLO
from field_notes import FIELDS_OF
from field_table import FIELDS

from quire.frontend.client.outputs import Delta, Logprob
from quire.frontend.http.api.bodies.body import IGNORED, BodyDecoder
from quire.frontend.http.api.bodies.schemas import ChatRequest, CompletionRequest
from quire.frontend.http.api.bodies.unknown_fields import UnknownFields
from quire.frontend.http.api.routes import ROUTES

KINDS = {"chat": ChatRequest, "completions": CompletionRequest}
PROMPT = {"prompt": "a"}


def run(main) -> None:
    asyncio.run(main())


# ------------------------------------------------------------------------------------------------------------- the table
@pytest.mark.parametrize("route", KINDS)
def test_the_table_holds_every_field(route):
    here = {f.name: f for f in FIELDS if f.routes in (route, "both")}
    known = set(KINDS[route].__struct_fields__) | IGNORED
    assert len(here) == sum(f.routes in (route, "both") for f in FIELDS)
    assert known - here.keys() == set(), "fields that the table lacks"
    assert here.keys() - known == set(), "fields that no body has"
    assert {n for n, f in here.items() if f.treatment == "harmless"} <= IGNORED


@pytest.mark.parametrize(("route", "reference"), [("chat", openai.types.chat), ("completions", openai.types)])
def test_the_table_holds_what_the_openai_package_can_send(route, reference):
    sent = set(reference.completion_create_params.CompletionCreateParamsBase.__annotations__)
    assert len(sent) > 10 and sent - {f.name for f in FIELDS if f.routes in (route, "both")} == set()


@pytest.mark.parametrize(("path", "route", "base"), [(CHAT, "chat", HELLO), (COMPLETIONS, "completions", PROMPT)])
def test_refused_fields_get_a_400_that_names_them(path, route, base):
    async def main():
        api = http.Api()
        for field in FIELDS:
            if field.treatment == "refused" and field.routes in (route, "both"):
                status, answer = await api.json("POST", path, {**base, field.name: {"some": ["value"]}})
                assert status == 400 and answer["error"]["param"] == field.name, (field.name, answer)
                assert field.name in answer["error"]["message"]
        assert not api.client.streams

    run(main)


GENERATE = ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {}})


@pytest.mark.parametrize(
    ("route", "struct", "within"),
    [
        (GENERATE, "GenerateRequest", None), (GENERATE, "TokenSamplingParams", "sampling_params"),
        (("/tokenize", {"prompt": "a"}), "TokenizeRequest", None),
    ],
)  # fmt: skip
def test_what_notes_say_to_be_refused_is_refused(route, struct, within):
    """Of bodies without a table of their own, by notes or by the common table."""
    (path, base), common = route, {f.name: f.treatment for f in FIELDS}
    kind = next(r.body for r in ROUTES.routes if r.path == path)
    names = kind.__struct_fields__ if within is None else kind.__annotations__[within].__struct_fields__
    own = FIELDS_OF[struct]
    refused = [name for name in names if (own[name].treatment if name in own else common.get(name)) == "refused"]

    async def main():
        api = http.Api()
        for name in refused:
            extra = {name: {"some": ["value"]}}
            status, answer = await api.json("POST", path, {**base, **(extra if within is None else {within: extra})})
            assert status == 400 and name in answer["error"]["message"], (name, answer)

    assert refused
    run(main)


def test_what_clients_of_vllm_send_beside_a_prompt():
    async def main():
        api = http.Api()
        status, answer = await api.json("POST", COMPLETIONS, {"prompt": None, "prompt_embeds": "AAAA", "max_tokens": 1})
        assert status == 400 and answer["error"]["param"] == "prompt_embeds"
        status, answer = await api.json("POST", COMPLETIONS, {"prompt": None})
        assert status == 400 and answer["error"]["param"] == "prompt"
        status, answer = await api.json("POST", COMPLETIONS, {**PROMPT, "model": ""})
        assert status == 200 and answer["model"] == "tiny"
        for path, base in [(CHAT, HELLO), (COMPLETIONS, PROMPT)]:
            padded = {**base, "stream": True, "stream_options": {"include_obfuscation": True}}
            status, answer = await api.json("POST", path, padded)
            assert status == 400 and answer["error"]["param"] == "stream_options.include_obfuscation"
            assert await api.events(path, {**base, "stream_options": {"include_obfuscation": False}})

    run(main)


# -------------------------------------------------------------------------------------------------- numbers and booleans
def test_numbers_and_booleans_are_taken_as_pydantic_takes_them():
    async def main():
        api = http.Api()
        loose = {
            "n": "2", "max_tokens": 9.0, "temperature": "0.5", "top_k": "7", "seed": 42.0, "stop_token_ids": ["3", 4.0],
            "logit_bias": {"5": "-1.5"}, "ignore_eos": 1, "min_tokens": "2", "skip_special_tokens": "false", "priority": "-3",
            "stop": ["5"],
        }  # fmt: skip
        for path, base in [(CHAT, HELLO), (COMPLETIONS, PROMPT)]:
            status, answer = await api.json("POST", path, {**base, **loose})
            assert status == 200, answer
            p = api.client.streams[-1].params
            assert (p.n, p.max_tokens, p.temperature, p.top_k, p.seed, p.min_tokens) == (2, 9, 0.5, 7, 42, 2)
            assert (p.stop_token_ids, p.logit_bias, p.ignore_eos, p.skip_special_tokens) == ([3, 4], {5: -1.5}, True, False)
            assert p.stop == ["5"] and api.client.streams[-1].options["priority"] == -3
        status, _ = await api.json("POST", COMPLETIONS, {"prompt": [5.0, "6"]})
        assert status == 400  # neither ids nor texts
        most = api.client.welcome.limits.max_logprobs
        for given, want in [(True, 1), (False, None), ("3", 3), (0, 0), (-1, most)]:
            await api.json("POST", COMPLETIONS, {**PROMPT, "logprobs": given})
            assert api.client.streams[-1].params.logprobs == want
        for wrong in ({"n": 1.5}, {"n": "two"}, {"n": True}, {"temperature": "nan"}, {"stream": 2}, {"seed": "1e400"}):
            status, answer = await api.json("POST", COMPLETIONS, {**PROMPT, **wrong})
            assert status == 400 and answer["error"]["param"] == next(iter(wrong)), (wrong, answer)

    run(main)


# --------------------------------------------------------------------------------------------------------- unknown names
class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def lines(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    return caplog


def test_made_up_names_silence_nobody(lines):
    clock = Clock()
    unknown, decoder = UnknownFields(clock), BodyDecoder(CompletionRequest)

    def send(name: str) -> None:
        decoder.decode(bytearray(b'{"prompt": "a", "%b": 1}' % name.encode()), unknown)

    for i in range(10_000):
        send(f"nonsense-of-client-{i}")
    flood = len(lines.messages)
    assert flood <= 60
    send("temprature")  # a likely mistake
    assert "'temprature'" in lines.messages[-1] and "did you mean 'temperature'?" in lines.messages[-1]
    send("unheard")
    assert len(lines.messages) == flood + 1
    clock.now += 60.0  # and any other, soon
    send("unheard")
    assert "'unheard'" in lines.messages[-1]
    for _ in range(3):
        send("temprature")
    assert len(lines.messages) == flood + 2
    assert len(unknown._said) <= 1000


def test_one_body_of_many_names_is_looked_at_in_part(lines):
    body = b'{"prompt": "a", ' + b", ".join(b'"field-%d": 1' % i for i in range(100_000)) + b"}"
    BodyDecoder(CompletionRequest).decode(bytearray(body), UnknownFields())
    assert 1 <= len(lines.messages) <= 10


# ------------------------------------------------------------------------------------------------------------ near paths
@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"), ("/v1/chat/completion", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"), ("/v1/chat/completions/", "/v1/chat/completions"),
        ("//v1/completions", "/v1/completions"), ("/api/v1/completions", "/v1/completions"), ("/models", "/v1/models"),
        ("/V1/Models", "/v1/models"), ("/v1/tokenize", "/tokenize"), ("/metric", "/metrics"), ("/healthz", "/health"),
        ("/v1/something/else", None), ("/" + "a" * 5000, None), ("/%ff%00", None), ("/favicon.ico", None),
    ],
)  # fmt: skip
def test_a_path_that_is_nearly_right_says_so(path, meant):
    async def main():
        status, answer = await http.Api().json("POST" if "compl" in path or "token" in path else "GET", path)
        text = answer["error"]["message"]
        assert status == 404 and answer["error"]["code"] == "not_found"
        assert (f"Did you mean {meant}?" in text) if meant else "Did you mean" not in text

    run(main)


def test_a_stranger_is_told_no_paths():
    async def main():
        status, answer = await http.Api(api_keys=["k"]).json("GET", "/model")
        assert status == 401 and "mean" not in answer["error"]["message"]

    run(main)


# --------------------------------------------------------------------------------------------------------------- best_of
def speak_of_quality(client):
    """Children of one to four tokens, the later ones likelier a token."""

    def speak(stream):
        p = stream.params
        for i in range(p.n):
            ids = [65 + i] * (i % 4 + 1)
            rows = None if p.logprobs is None else [{t: Logprob(-10.0 + i, 1, "x")} for t in ids]
            stream.push(Delta(i, chr(65 + i), ids, rows, "stop", None, len(ids)))
        stream.end()

    client.speak = speak


@pytest.mark.parametrize(("path", "base"), [(CHAT, HELLO), (COMPLETIONS, PROMPT)])
def test_best_of_returns_the_likeliest_a_token(path, base):
    async def main():
        api = http.Api()
        speak_of_quality(api.client)
        status, answer = await api.json("POST", path, {**base, "n": 2, "best_of": 5})
        (stream,) = api.client.streams
        assert status == 200 and (stream.params.n, stream.params.logprobs) == (5, 0)
        choices = answer["choices"]
        texts = [c["message"]["content"] if path == CHAT else c["text"] for c in choices]
        assert texts == ["E", "D"] and [c["index"] for c in choices] == [0, 1]
        assert all(c["logprobs"] is None for c in choices)
        assert answer["usage"]["completion_tokens"] == 1 + 2 + 3 + 4 + 1  # all that were generated, as OpenAI counts
        status, answer = await api.json("POST", path, {**base, "n": 2, "best_of": 5, "stream": True})
        assert status == 400 and answer["error"]["param"] == "best_of"
        assert (await api.events(path, {**base, "n": 2, "best_of": 2}))[-1] == "[DONE]"
        logprobs = {"logprobs": True} if path == CHAT else {"logprobs": 1}
        status, answer = await api.json("POST", path, {**base, "best_of": 3, **logprobs})
        assert status == 200 and len(answer["choices"]) == 1 and answer["choices"][0]["logprobs"]

    run(main)


def test_best_of_counts_among_the_sequences_of_a_request():
    async def main():
        status, answer = await http.Api().json("POST", COMPLETIONS, {"prompt": ["a"] * 20, "best_of": 128})
        assert status == 400 and answer["error"]["param"] == "best_of"

    run(main)


# ------------------------------------------------------------------------------------------------------ prompts and names
def test_truncation_from_either_side_and_to_what_fits():
    async def main():
        api = http.Api()
        text = "".join(chr(97 + i % 26) for i in range(500))
        encode = api.client.tokenizer.encode
        for extra, want in [
            ({"truncate_prompt_tokens": 5}, text[-5:]),
            ({"truncate_prompt_tokens": 5, "truncation_side": "left"}, text[-5:]),
            ({"truncate_prompt_tokens": 5, "truncation_side": "right"}, text[:5]),
            ({"truncate_prompt_tokens": -1, "max_tokens": 20}, text[-180:]),
            ({"truncate_prompt_tokens": -1, "max_tokens": 20, "truncation_side": "right"}, text[:180]),
            ({"truncate_prompt_tokens": "-1"}, text[-199:]),
        ]:
            for prompt in (text, encode(text)):
                status, answer = await api.json("POST", COMPLETIONS, {"prompt": prompt, **extra})
                assert status == 200, answer
                assert api.client.streams[-1].ids == encode(want)

    run(main)


def test_a_request_id_of_the_body_names_the_answer():
    async def main():
        api = http.Api()
        for path, base, prefix in [(CHAT, HELLO, "chatcmpl"), (COMPLETIONS, PROMPT, "cmpl")]:
            _, answer = await api.json("POST", path, {**base, "request_id": "mine-1"})
            assert answer["id"] == f"{prefix}-mine-1"
            _, answer = await api.json("POST", path, {**base, "request_id": "mine"}, {"X-Request-Id": "theirs"})
            assert answer["id"] == f"{prefix}-theirs"  # the header goes before it

    run(main)


def test_chats_echo_the_assistants_last_message():
    async def main():
        api = http.Api()
        open_end = [*HELLO["messages"], {"role": "assistant", "content": [{"type": "text", "text": "Well, "}]}]
        body = {"messages": open_end, "echo": True, "continue_final_message": True, "n": 2}
        _, answer = await api.json("POST", CHAT, body)
        assert [c["message"]["content"] for c in answer["choices"]] == ["Well, " + api.client.OUTPUT] * 2
        texts = ["", ""]
        for event in (await api.events(CHAT, body))[:-1]:
            for choice in event["choices"]:
                texts[choice["index"]] += choice["delta"].get("content", "")
        assert texts == ["Well, " + api.client.OUTPUT] * 2
        _, answer = await api.json("POST", CHAT, {**HELLO, "echo": True})  # the user's is not
        assert answer["choices"][0]["message"]["content"] == api.client.OUTPUT

    run(main)


def test_the_rendered_prompt_is_returned_if_asked_for():
    async def main():
        api = http.Api()
        _, answer = await api.json("POST", CHAT, {**HELLO, "return_prompt_text": True})
        assert answer["prompt_text"] == "<user>hi<assistant>"
        events = await api.events(CHAT, {**HELLO, "return_prompt_text": True})
        assert [e.get("prompt_text") for e in events[:2]] == ["<user>hi<assistant>", None]
        _, answer = await api.json("POST", CHAT, HELLO)
        assert "prompt_text" not in answer

    run(main)


def test_settings_of_images_need_trust():
    async def main():
        for path in (CHAT, "/tokenize"):
            status, answer = await http.Api().json("POST", path, {**HELLO, "mm_processor_kwargs": {"max_pixels": 784}})
            assert status == 400 and answer["error"]["param"] == "mm_processor_kwargs"
            assert "--trust-request-mm-kwargs" in answer["error"]["message"]

    run(main)


def test_a_template_of_the_requests_own_needs_trust():
    async def main():
        own = {"chat_template": "{{ messages[0].content }}!"}
        for path, body in [(CHAT, {**HELLO, **own}), ("/tokenize", {**HELLO, **own})]:
            status, answer = await http.Api().json("POST", path, body)
            assert status == 400 and answer["error"]["param"] == "chat_template"
            assert "--trust-request-chat-template" in answer["error"]["message"]
            api = http.Api(trust_request_chat_template=True)
            status, answer = await api.json("POST", path, body)
            assert status == 200, answer
            ids = answer["tokens"] if path == "/tokenize" else api.client.streams[-1].ids
            assert api.client.tokenizer.decode(ids) == "hi!"
            for bad in ("{{ ''.__class__.__mro__ }}", "{{ nowhere.at_all }}", "{% for %}"):
                status, answer = await api.json("POST", path, {**HELLO, "chat_template": bad})
                assert status == 400, answer

    run(main)


def test_the_prefix_cache_can_be_left_unread():
    async def main():
        api = http.Api()
        await api.json("POST", COMPLETIONS, {**PROMPT, "skip_reading_prefix_cache": True})
        assert api.client.streams[-1].params.skip_reading_prefix_cache is True

    run(main)


def test_a_budget_of_minus_one_is_no_limit():
    async def main():
        api = http.Api()
        for path, base in [(CHAT, HELLO), (COMPLETIONS, PROMPT)]:
            status, answer = await api.json("POST", path, {**base, "thinking_token_budget": -1})
            assert status == 200, answer
            assert api.client.streams[-1].params.thinking_token_budget is None

    run(main)

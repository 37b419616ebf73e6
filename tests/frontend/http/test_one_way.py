"""A request goes one way: body, checked request, prompt, SamplingParams; and each of its stations is entered once."""

import asyncio
import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
from fake_client import CHAT, COMPLETIONS, HELLO
from responses_cases import HERMES, RESPONSES, serving

from quire.frontend.http.api.bodies import params
from quire.frontend.text import tokenizer
from quire.ipc.sampling import SamplingParams

MESSAGES, TOKENS = "/v1/messages", "/inference/v1/generate"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, HELLO),
    (CHAT, {**HELLO, "bad_words": ["zz"], "temperature": 0.5, "seed": 7, "stop": "x", "max_tokens": 9}),
    (CHAT, {**HELLO, "tools": TOOLS, "tool_choice": "required"}),
    (CHAT, {**HELLO, "response_format": {"type": "json_object"}, "logprobs": True}),
    (COMPLETIONS, {"prompt": "a"}),
    (COMPLETIONS, {"prompt": "a", "n": 2, "echo": True, "logprobs": 1, "bad_words": ["zz"]}),
    (RESPONSES, {"input": "hi"}),
    (RESPONSES, {"input": "hi", "tools": [{"type": "function", "name": "f"}], "tool_choice": "required"}),
    (MESSAGES, {**HELLO, "max_tokens": 9}),
    (MESSAGES, {**HELLO, "max_tokens": 1_000_000}),  # cut to the context's room
    ("/api/chat", {**HELLO, "tools": TOOLS, "format": "json", "options": {"num_predict": 1_000_000, "stop": "x"}}),
    ("/api/generate", {"prompt": "a", "think": False}),
    ("/api/generate", {"prompt": "a", "raw": True, "options": {"num_predict": 9}}),
    (TOKENS, {"token_ids": [1, 2], "sampling_params": {}}),
    (TOKENS, {"token_ids": [1, 2], "sampling_params": {"max_tokens": 1000, "min_tokens": 500, "bad_words": ["zz"]}}),
]


@contextlib.contextmanager
def calls(counted: Counter[str]) -> Iterator[None]:
    """Count what this thread calls within: SamplingParams that are made, and calls into two files from other files of ours."""
    made, files = SamplingParams.__post_init__.__code__, {params.__file__: "params", tokenizer.__file__: "tokenizer"}

    def on_event(frame: FrameType, event: str, arg: Any) -> None:
        if event != "call":
            return
        code, caller = frame.f_code, frame.f_back
        counted["SamplingParams"] += code is made
        name, by = files.get(code.co_filename), caller.f_globals.get("__name__", "") if caller is not None else ""
        if name is not None and by.startswith("quire.") and by != frame.f_globals.get("__name__"):
            counted[name] += 1

    sys.setprofile(on_event)
    try:
        yield
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_a_request_makes_its_params_once(path, body, stream):
    async def main():
        async with serving(template=HERMES, log_requests=True) as api:
            counted = Counter[str]()
            with calls(counted):
                answer = await api.ask("POST", path, {**body, "stream": stream})
                assert answer.status == 200, answer
            assert counted["SamplingParams"] == 1
            (submitted,) = api.client.streams
            # what the engine's client would cut and fill in, by making others, is done
            sent, room = submitted.params, api.client.welcome.limits.max_model_len - len(submitted.ids)
            assert sent.max_tokens is None or sent.max_tokens <= room
            assert bool(sent.bad_words_token_ids) == bool(sent.bad_words)

    asyncio.run(main())


def test_the_best_of_several_are_asked_for_at_once():
    async def main():
        async with serving() as api:
            counted = Counter[str]()
            with calls(counted):
                status, answer = await api.json("POST", COMPLETIONS, {"prompt": "a", "n": 2, "best_of": 3})
            assert status == 200 and len(answer["choices"]) == 2
            (submitted,) = api.client.streams
            assert counted["SamplingParams"] == 1 and (submitted.params.n, submitted.params.logprobs) == (3, 0)

    asyncio.run(main())


def test_a_streamed_chat_enters_params_and_tokenizer_once():
    async def main():
        async with serving() as api:
            await api.events(CHAT, HELLO)  # the template is compiled
            counted = Counter[str]()
            with calls(counted):
                await api.events(CHAT, HELLO)
            assert (counted["params"], counted["tokenizer"]) == (1, 1)

    asyncio.run(main())

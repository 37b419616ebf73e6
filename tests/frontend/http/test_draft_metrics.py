"""`metrics.speculative_decoding` of answers: there where the engine tells it, under vLLM's names."""

import asyncio

import fake_client as http
import msgspec
import pytest
from fake_client import CHAT, COMPLETIONS, HELLO

from quire.ipc.messages.frontend import DraftsTold

STEPS = [(3, 0), (3, 3), (1, 1), (3, 1)]
SUMMARY = {
    "mean_acceptance_length": 2.25,
    "draft_acceptance_rate": 0.5,
    "acceptance_histogram": [1, 2, 0, 1],
    "acceptance_histogram_by_draft_length": {"1": [0, 1], "3": [1, 1, 0, 1]},
    "num_spec_steps": 4,
    "num_accepted_draft_tokens": 5,
    "num_draft_tokens": 10,
    "num_spec_tokens": 3,
}
BODIES = {CHAT: HELLO, COMPLETIONS: {"model": "tiny", "prompt": "hi"}}


def api_of(told: DraftsTold | None, steps: list[tuple[int, int]] | None) -> http.Api:
    api = http.Api()
    api.client.welcome = msgspec.structs.replace(api.client.welcome, drafts_told=told)
    speak = api.client.speak

    def with_drafts(stream) -> None:
        stream.metrics.drafts = steps
        speak(stream)

    api.client.speak = with_drafts
    return api


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("by_step", [False, True])
def test_an_answer_says_how_its_drafts_fared(path: str, by_step: bool) -> None:
    async def main() -> None:
        api = api_of(DraftsTold(by_step, 3), STEPS)
        status, answer = await api.json("POST", path, BODIES[path])
        more = {"per_step_accepted": [0, 3, 1, 1], "per_step_drafted": [3, 3, 1, 3]} if by_step else {}
        assert status == 200 and answer["metrics"] == {"speculative_decoding": SUMMARY | more}
        events = await api.events(path, {**BODIES[path], "stream": True, "stream_options": {"include_usage": True}})
        assert events[-2]["usage"] == answer["usage"] and events[-2]["metrics"] == answer["metrics"]
        assert not any("metrics" in event for event in events[:-2])

    asyncio.run(main())


def test_answers_of_several_sequences_and_without_drafts() -> None:
    async def main() -> None:
        api = api_of(DraftsTold(False, 2), None)
        _, answer = await api.json("POST", CHAT, HELLO)
        found = answer["metrics"]["speculative_decoding"]
        assert found["acceptance_histogram"] == [0, 0, 0] and found["mean_acceptance_length"] == 1
        for body in ({"n": 2}, {"prompt": ["a", "b"]}, {"best_of": 2}):
            _, answer = await api.json("POST", COMPLETIONS, BODIES[COMPLETIONS] | body)
            assert answer["metrics"] is None
        _, answer = await api_of(None, None).json("POST", CHAT, HELLO)
        assert "metrics" not in answer

    asyncio.run(main())

"""For tests of /v1/responses: an Api with a store that is closed after the test, and events parsed as by the openai package."""

import contextlib
import json

import fake_client as http
from fake_http import Answer
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from quire.frontend.client.outputs import Delta

RESPONSES = "/v1/responses"
HERMES = http.TEMPLATE + "{# <tool_call></tool_call> #}"
THINKS = HERMES + "{# <think></think> #}{% if enable_thinking is false %}<think></think>{% endif %}"
_event = TypeAdapter(ResponseStreamEvent)


@contextlib.asynccontextmanager
async def serving(output: str | None = None, template: str = http.TEMPLATE, special: tuple[str, ...] = (), **options):
    """An Api whose engine says this; its store is closed in the end."""
    client = http.FakeClient(template=template, special=special)
    if output is not None:
        client.OUTPUT = output
    api = http.Api(client, **options)
    try:
        yield api
    finally:
        for task in list(api.services.state.background.values()):
            task.cancel()
        await api.services.storage.close()


async def create(api, body, headers=None) -> dict:
    """An answer in one piece, that the openai package would take."""
    status, answer = await api.json("POST", RESPONSES, body, headers)
    assert status == 200, answer
    Response.model_validate(answer)
    return answer


async def refusal(api, body, headers=None) -> dict:
    status, answer = await api.json("POST", RESPONSES, body, headers)
    assert status == 400, answer
    assert answer["error"]["message"]
    return answer["error"]


def events_of(answer: Answer) -> list[dict]:
    """Of a stream: named by their types, numbered without gaps, taken by the openai package's own types and state."""
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/event-stream"), answer
    blocks = answer.body.decode().split("\n\n")
    assert blocks.pop() == ""
    events, state = [], ResponseStreamState(input_tools=omit, text_format=omit)
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        state.handle_event(_event.validate_python(events[-1]))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


async def stream(api, body) -> list[dict]:
    return events_of(await api.ask("POST", RESPONSES, {**body, "stream": True}))


def without_ids(value):
    """For comparing two answers to one request."""
    if isinstance(value, list):
        return [without_ids(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {k: without_ids(v) for k, v in value.items() if k not in ("id", "call_id", "created_at", "completed_at")}


async def both(api, body) -> tuple[dict, list[dict]]:
    """An answer in one piece and a stream's events, which must come to the same."""
    whole, events = await create(api, body), await stream(api, body)
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    _check_events(events)
    return whole, events


def _check_events(events: list[dict]) -> None:
    """Deltas add up to what is done, items to the response's output."""
    texts: dict[str, str] = {}
    last = events[-1]["response"]
    assert [e["type"] for e in events[:2]] == ["response.created", "response.in_progress"]
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind.endswith(".delta"):
            texts[event["item_id"]] = texts.get(event["item_id"], "") + event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert event["text"] == texts.get(event["item_id"], "")
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == texts.get(event["item_id"], "")
        elif kind == "output_item.done":
            assert event["item"] == last["output"][event["output_index"]]
    added = [e["item"]["id"] for e in events if e["type"] == "response.output_item.added"]
    assert added == [item["id"] for item in last["output"]] and len(set(added)) == len(added)


def said(api, index: int = -1) -> str:
    """The prompt of a request, as text."""
    return api.client.tokenizer.decode(api.client.streams[index].ids)


def say(api, *pieces: str) -> None:
    """Let the engine say these texts, a delta each, in the tokens that they are: special ones too."""
    client = api.client

    def speak(stream):
        num_tokens, stream.num_cached_tokens = 0, 4
        for i, piece in enumerate(pieces):
            ids = client.tokenizer.encode(piece, add_special_tokens=False)
            num_tokens += len(ids)
            top = stream.params.logprobs
            rows = None if top is None else [client.row(id, top) for id in ids]
            end = "stop" if i == len(pieces) - 1 else None
            stream.push(Delta(0, "" if piece == "</s>" else piece, ids, rows, end, None, num_tokens))
        stream.end()

    client.speak = speak

"""Requests as other programs send them, replayed: each is answered with what the program reads, or with the refusal documented.

recorded/*.json, one a program: `source` says where its requests were seen (texts and tools are ours). `reads` names what the
program takes from the answer, as a path and a type or a JSON Schema; of a stream, some event must have each of them.
"""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from client_packages import Server

FILES = sorted((Path(__file__).parent / "recorded").glob("*.json"))


def at(value: Any, path: str) -> list[Any]:
    """What stands there: nothing or one thing."""
    for name in path.split("."):
        if isinstance(value, list) and name.isdigit() and int(name) < len(value):
            value = value[int(name)]
        elif isinstance(value, dict) and name in value:
            value = value[name]
        else:
            return []
    return [value]


def check(parts: list[Any], reads: dict[str, Any]) -> None:
    for path, wanted in reads.items():
        schema = {"type": wanted} if isinstance(wanted, str) else wanted
        found = [value for part in parts for value in at(part, path)]
        assert any(jsonschema.Draft202012Validator(schema).is_valid(value) for value in found), (path, schema, found, parts)


def events(body: bytes) -> list[Any]:
    """Of a stream that has ended well. Events with names (/v1/responses, /v1/messages) have no [DONE] behind them."""
    blocks = body.decode().split("\n\n")
    assert blocks.pop() == ""
    if not blocks[0].startswith("event: "):
        assert blocks.pop() == "data: [DONE]"
    found = [json.loads(block.partition("data: ")[2]) for block in blocks]
    assert not any("error" in event for event in found)
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_request_is_answered_with_what_its_program_reads(server: Server, file: Path) -> None:
    for request in json.loads(file.read_text())["requests"]:
        answer = server.ask(request["method"], request["path"], request.get("body"), request.get("headers"))
        assert answer.status == request.get("status", 200), (request["name"], answer)
        if request["reads"] is None:  # text that is not JSON
            assert answer.body
            continue
        streamed = answer.headers["content-type"].startswith("text/event-stream")
        assert streamed == (answer.status == 200 and bool((request.get("body") or {}).get("stream"))), request["name"]
        check(events(answer.body) if streamed else [answer.json()], request["reads"])


def test_every_recording_says_where_it_was_seen() -> None:
    assert len(FILES) >= 8
    for file in FILES:
        recording = json.loads(file.read_text())
        assert recording["program"] and recording["source"] and recording["requests"]
        names = [request["name"] for request in recording["requests"]]
        assert len(set(names)) == len(names)

"""Claude Code, Codex and OpenCode: the programs themselves, run once for a chat, once for a tool call, once for an object.

A random model would call no tool by itself. So the proxy before the server sets `temperature` to 0 and, where a call is wanted,
`tool_choice` to one of the program's own tools that only reads, with a bound on the length of its arguments. Calls and
texts are the model's. The program runs the tool, sends its result back and prints the next answer. `ask` returns what asks.py's
`Found` prints.
"""

import json
import os
import subprocess
import tempfile
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from api_shapes import SHAPES, Shape
from asks import PERSON_SCHEMA
from recording_proxy import RecordingProxy, Seen

TIMEOUT_S = 300
TRIES = 4
MAX_TOKENS = 1000  # more would be a random model that goes round
MODEL = "tiny"
PROMPT = "Say hello."
PERSON_PROMPT = "Tell me about a person."


class Run(NamedTuple):
    """One run of a program. text: what it printed as the answer. seen: its requests that offer tools, in order."""

    text: str
    structured: Any
    seen: list[Seen]


class Agent(NamedTuple):
    """path: of its requests. tool: the one that is called. command: from home, URL and the file of a schema (or None) to words
    and environment. read: from its output to the answer's text and the object."""

    package: str
    path: str
    tool: str
    command: Callable[[Path, str, Path | None], tuple[list[str], dict[str, str]]]
    read: Callable[[str], tuple[str, Any]]
    object_by_tool: str | None = None  # this program asks for an object as the arguments of a tool
    objects: bool = True

    @property
    def shape(self) -> Shape:
        return SHAPES[self.path]


class Place(NamedTuple):
    """path: folders of the programs and of node. recordings: the requests are added to it."""

    path: list[Path]
    url: str
    key: str
    recordings: list[Seen]


def ask(agent: Agent, place: Place) -> dict[str, Any]:
    shape = agent.shape
    for _ in range(TRIES):
        chat = _run(agent, place)
        first = chat.seen[0]
        parts = shape.parts_of(first.answer)
        if len(parts) > 1:  # some answers of a random model have one token
            break
    whole = shape.text_of(_ask_whole(place, agent.path, first.sent))
    assert chat.text.strip() == "".join(parts).strip(), f"it printed {chat.text!r}, and the server said {parts}"
    called = _run(agent, place, agent.tool)
    assert len(called.seen) > 1, f"it did not go on after its tool: {called.seen[0].answer[-600:]}"
    (call,) = shape.calls_of(called.seen[0].answer)
    assert shape.is_answered(call, called.seen[1].body), f"it sent no result of call {call}: {called.seen[1].body}"
    schema = shape.tool_schema(called.seen[0].body, agent.tool)
    found = {
        "chat": {"whole": whole, "parts": parts},
        "tool": {"name": call.name, "arguments": json.loads(call.arguments), "wanted": agent.tool, "schema": schema},
    }
    if agent.objects:
        found["structured"] = _run(agent, place, agent.object_by_tool, PERSON_SCHEMA).structured
    return found


def _run(agent: Agent, place: Place, tool: str | None = None, schema: Any = None) -> Run:
    """tool: the first request that offers tools must call it."""
    shape = agent.shape
    forced = False

    def change(path: str, body: Any, _: int) -> Any:
        nonlocal forced
        if path != agent.path or body is None:
            return body
        body = {**body, "temperature": 0, shape.max_tokens: MAX_TOKENS}
        if tool is not None and body.get("tools") and not forced:
            forced = True
            body["tool_choice"] = shape.choice(tool)
            body["tools"] = [shape.with_schema(offered, tool, _short) for offered in body["tools"]]
        elif tool is None and schema is not None:
            body["tool_choice"] = "none"  # a random model would as soon call a tool as give the object
        return body

    with tempfile.TemporaryDirectory() as name, RecordingProxy(place.url, change) as proxy:
        home = Path(name)
        (home / "work").mkdir()
        file = None
        if schema is not None:
            file = home / "schema.json"
            file.write_text(json.dumps(schema))
        words, more = agent.command(home, proxy.url, file)
        kept = {name: value for name, value in os.environ.items() if name in ("SSL_CERT_FILE", "LANG")}
        path = ":".join([*map(str, place.path), os.environ["PATH"]])
        done = subprocess.run(
            [*words, PERSON_PROMPT if schema is not None else PROMPT],
            cwd=home / "work",
            env={**kept, "PATH": path, "HOME": name, "QUIRE_KEY": place.key, **more},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    place.recordings.extend(proxy.seen)
    refused = [f"{seen.path} {seen.status}: {seen.answer[:300]}" for seen in proxy.seen if seen.status >= 400]
    assert done.returncode == 0 and not refused, (refused, done.returncode, done.stdout[-800:], done.stderr[-800:])
    text, value = agent.read(done.stdout)
    return Run(text, value, [seen for seen in proxy.seen if seen.path == agent.path and seen.body and seen.body.get("tools")])


def _short(schema: dict[str, Any]) -> dict[str, Any]:
    """What is required, and no long texts: a random model seldom ends one."""
    properties = {name: schema["properties"][name] for name in schema.get("required", ())}
    short = {name: {**value, "maxLength": 40} if value["type"] == "string" else value for name, value in properties.items()}
    return {**schema, "properties": short, "additionalProperties": False}


def _ask_whole(place: Place, path: str, body: Mapping[str, Any]) -> Any:
    """The same request without a stream."""
    body = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {place.key}"}
    request = urllib.request.Request(f"{place.url}{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        return json.load(response)


# ---------------------------------------------------------------------------------------------------------- the programs
def _claude_code(home: Path, url: str, schema: Path | None) -> tuple[list[str], dict[str, str]]:
    words = ["claude", "-p", "--output-format", "json"]
    if schema is not None:
        words += ["--json-schema", schema.read_text()]
    return words, {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "secret",
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "2000",
    }


def _claude_said(output: str) -> tuple[str, Any]:
    result = json.loads(output)
    assert not result["is_error"], result
    return result["result"], result.get("structured_output")


CODEX_CONFIG = """
model = "{model}"
model_provider = "quire"
model_context_window = 262144

[model_providers.quire]
name = "Quire"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "QUIRE_KEY"
request_max_retries = 0
stream_max_retries = 0
"""


def _codex(home: Path, url: str, schema: Path | None) -> tuple[list[str], dict[str, str]]:
    (home / ".codex").mkdir()
    (home / ".codex" / "config.toml").write_text(CODEX_CONFIG.format(model=MODEL, url=url))
    more = ["--output-schema", str(schema)] if schema is not None else []
    return ["codex", "exec", "--skip-git-repo-check", "--json", *more], {"CODEX_HOME": str(home / ".codex")}


def _codex_said(output: str) -> tuple[str, Any]:
    events = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    text = [item["text"] for item in items if item["type"] == "agent_message"][-1]
    return text, json.loads(text) if text.startswith("{") else None


def _opencode(home: Path, url: str, schema: Path | None) -> tuple[list[str], dict[str, str]]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": "{env:QUIRE_KEY}"},
        "models": {MODEL: {"limit": {"context": 262144, "output": 2000}}},
    }
    config = {
        "model": f"quire/{MODEL}",
        "small_model": f"quire/{MODEL}",
        "autoupdate": False,
        "share": "disabled",
        "provider": {"quire": provider},
    }
    (home / "work" / "opencode.json").write_text(json.dumps(config))
    return ["opencode", "run", "--format", "json"], {"OPENCODE_DISABLE_MODELS_FETCH": "1"}


def _opencode_said(output: str) -> tuple[str, Any]:
    parts = [event["part"] for line in output.splitlines() if line.startswith("{") and "part" in (event := json.loads(line))]
    return "".join(part["text"] for part in parts if part["type"] == "text"), None


AGENTS = {
    "claude-code": Agent(
        "@anthropic-ai/claude-code", "/v1/messages", "Read", _claude_code, _claude_said, object_by_tool="StructuredOutput"
    ),
    "codex": Agent("@openai/codex", "/v1/responses", "view_image", _codex, _codex_said),
    "opencode": Agent("opencode-ai", "/v1/chat/completions", "read", _opencode, _opencode_said, objects=False),
}

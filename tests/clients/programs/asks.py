"""Questions for the clients, and the line of JSON that each client's script prints. The scripts import nothing else of ours.

A script is `python NAME.py BASE_URL KEY MODEL` in the client's own environment. run_clients.py checks what it prints:
`chat` (the same answer at once and as the parts of a stream), `tool` (the call that the client read) and `structured` (what the
client made of an answer that a schema holds). A client without one of these leaves it out.
"""

import importlib.metadata
import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

BASE_URL, KEY, MODEL = (*sys.argv[1:4], "", "", "")[:3]
CHAT = "Tell me about a dog."
WEATHER = "What is the weather in Paris?"
PERSON = "Tell me about a person"
MAX_TOKENS = 300

WEATHER_PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER_FUNCTION = {"name": "get_weather", "description": "Get the weather of a city.", "parameters": WEATHER_PARAMETERS}
WEATHER_TOOL = {"type": "function", "function": WEATHER_FUNCTION}


class Person(BaseModel):
    """A person."""

    model_config = ConfigDict(extra="forbid")
    name: Literal["Ann", "Tom"]
    age: int = Field(ge=0, le=99)


PERSON_SCHEMA = Person.model_json_schema()


def messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


class Found:
    """What a client got, part by part; `say` prints it with the client's version."""

    def __init__(self, *packages: str) -> None:
        self._found: dict[str, Any] = {"version": ", ".join(importlib.metadata.version(name) for name in packages)}

    def chat(self, whole: str | None, parts: Iterable[str | None]) -> None:
        self._found["chat"] = {"whole": whole, "parts": [part for part in parts if part]}

    def tool(self, name: str, arguments: str | Mapping[str, Any]) -> None:
        """arguments: as the client has them, a text or an object."""
        self._found["tool"] = {
            "name": name,
            "arguments": json.loads(arguments) if isinstance(arguments, str) else dict(arguments),
        }

    def structured(self, value: BaseModel | str | Any) -> None:
        if isinstance(value, BaseModel):
            value = value.model_dump()
        self._found["structured"] = json.loads(value) if isinstance(value, str) else value

    def say(self) -> None:
        print(json.dumps(self._found))

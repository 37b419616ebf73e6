"""Shared by the tests of client packages: the server's address, key and model, a function to call, a schema to fill."""

import json
from typing import Any, NamedTuple

from serving import Served

KEY = "secret"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Tom"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Server(NamedTuple):
    """Where it listens and what it takes. The bundled model adds numbers, calls get_weather, and else babbles."""

    process: Served
    url: str
    key: str = KEY
    model: str = "tiny"

    @property
    def base_url(self) -> str:
        """What OpenAI's clients want to be told."""
        return f"{self.url}/v1"

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
        return self.process.ask(method, path, body, {"Authorization": f"Bearer {self.key}", **(headers or {})})


def is_person(text: str) -> bool:
    person = json.loads(text)
    return set(person) == {"name", "age"} and person["name"] in ("Ann", "Tom") and 0 <= person["age"] <= 99

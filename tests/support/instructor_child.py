"""Run by tests/clients/test_instructor.py in an environment of its own: `python instructor_child.py BASE_URL KEY`.

Each mode that the server enforces must fill a class at the first try: at once, streamed in parts, and with the completion. It
prints a line of JSON: mode -> the fields.
"""

import json
import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, Field


class Person(BaseModel):
    """A person."""

    name: Literal["Ann", "Tom"]
    age: int = Field(ge=0, le=99)


def main(base_url: str, key: str) -> None:
    found = {}
    options = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Tell me about a person"}],
        "response_model": Person,
        "max_retries": 0,
        "temperature": 0,
        "max_tokens": 100,
    }
    with openai.OpenAI(base_url=base_url, api_key=key, max_retries=0) as plain:
        for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
            client = instructor.from_openai(plain, mode=mode)
            person = client.chat.completions.create(**options)
            *_, last = client.chat.completions.create_partial(**options)
            beside, completion = client.chat.completions.create_with_completion(**options)
            assert last.model_dump() == beside.model_dump() == person.model_dump() and completion.usage.total_tokens > 0
            found[mode.name] = person.model_dump()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

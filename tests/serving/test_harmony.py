"""A tiny random gpt-oss behind `quire serve`: forced calls and answers in a format, in Harmony, with its end tokens.

The model knows no format, so the grammars write the markers, and a bias makes it end its thoughts.
"""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from deadlines import DEADLINE_S
from harmony_cases import ids_of, write_checkpoint
from harmony_template import TEMPLATE
from serving import SMALL, Served

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.slow

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Bonn", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
ENDS = ["<|end|>", "<|return|>", "<|call|>"]
ASK: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Weather?"}],
    "max_tokens": 400,
    "seed": 3,
    "temperature": 1.0,
    "logit_bias": {str(id): 20 for id in ids_of(ENDS)},
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("gpt-oss")
    write_checkpoint(folder, TEMPLATE)
    with Served(str(folder), *SMALL, "--served-model-name", "tiny") as served:
        served.ready()
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as client:
            yield client
        assert served.end() == 0


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_that_is_forced_is_made(client: openai.OpenAI, choice: Any) -> None:
    whole = client.chat.completions.create(**ASK, tools=TOOLS, tool_choice=choice).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.content is None
    (call,) = whole.message.tool_calls
    assert call.function.name == "weather"
    jsonschema.validate(json.loads(call.function.arguments), CITY)
    with client.chat.completions.stream(**ASK, tools=TOOLS, tool_choice=choice) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion().choices[0]
    assert streamed.message.tool_calls[0].function.arguments == call.function.arguments


def test_a_format_is_of_the_answer(client: openai.OpenAI) -> None:
    format = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    answer = client.chat.completions.create(**ASK, response_format=format).choices[0]
    assert answer.finish_reason == "stop"
    jsonschema.validate(json.loads(answer.message.content), CITY)

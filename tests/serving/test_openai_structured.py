"""The `openai` package's helpers for structured output and strict tools, against `quire serve` with the bundled model."""

import enum
import itertools
import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from deadlines import DEADLINE_S
from serving import SMALL, Served

openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")

GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0.0, "max_tokens": 160}
IN_PARIS = [{"role": "user", "content": "What is the weather in Paris?"}]


class Color(enum.Enum):
    RED = "red"
    GREEN = "green"


class Pet(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=12)
    kind: Literal["dog", "cat"]


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=12)
    age: int = pydantic.Field(ge=0, le=150)
    likes: Color
    pets: list[Pet] = pydantic.Field(max_length=2)


class GetWeather(pydantic.BaseModel):
    """Get the weather of a city."""

    city: str
    unit: Literal["celsius", "fahrenheit"]
    days: int | None


WEATHER = openai.pydantic_function_tool(GetWeather, name="get_weather")
NAMED = {"type": "function", "function": {"name": "get_weather"}}
ONE_CALL = {"parallel_tool_calls": False}


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with Served(*SMALL, "--served-model-name", "tiny", "--max-model-len", "1024") as served:
        served.ready()
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as client:
            yield client
        assert served.end() == 0


def test_an_answer_is_parsed(client: openai.OpenAI) -> None:
    ask = {"messages": [{"role": "user", "content": "Who is Tom?"}], "response_format": Person}
    for sampling in ({}, {"temperature": 1.0, "seed": 5, "n": 3}):
        answer = client.chat.completions.parse(**{**GREEDY, **ask, **sampling})
        for choice in answer.choices:
            assert isinstance(choice.message.parsed, Person) and choice.finish_reason == "stop"
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**{**GREEDY, **ask, "max_tokens": 5})


def test_a_streamed_answer_is_parsed_on_the_way(client: openai.OpenAI) -> None:
    ask = {"messages": [{"role": "user", "content": "Who is Tom?"}], "response_format": Person}
    whole = client.chat.completions.parse(**GREEDY, **ask).choices[0].message
    with client.chat.completions.stream(**GREEDY, **ask) as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0].message
    assert final.parsed == whole.parsed and final.content == whole.content
    done = [event for event in events if event.type == "content.done"]
    assert len(done) == 1 and done[0].parsed == whole.parsed
    partial = [event.parsed for event in events if event.type == "content.delta"]
    assert len(partial) > 5 and partial[-1] == json.loads(whole.content or "")


@pytest.mark.parametrize("choice", ["auto", "required", NAMED], ids=["auto", "required", "named"])
def test_strict_calls_are_parsed(client: openai.OpenAI, choice: Any) -> None:
    ask: dict[str, Any] = {**GREEDY, "messages": IN_PARIS, "tools": [WEATHER], "tool_choice": choice}
    for sampling in ({}, {"temperature": 0.8, "seed": 2}):
        message = client.chat.completions.parse(**{**ask, **sampling}).choices[0].message
        call = (message.tool_calls or [None])[0]
        assert call is not None and isinstance(call.function.parsed_arguments, GetWeather), message
    with client.chat.completions.stream(**ask) as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0]
    greedy = client.chat.completions.parse(**ask).choices[0].message
    calls = final.message.tool_calls or []
    assert [c.function.arguments for c in calls] == [c.function.arguments for c in greedy.tool_calls or []]
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [event.parsed_arguments for event in done] == [c.function.parsed_arguments for c in calls]
    assert all(isinstance(event.parsed_arguments, GetWeather) and event.name == "get_weather" for event in done)


CITIES = [
    "Paris",
    "Rome",
    "Berlin",
    "London",
    "Madrid",
    "Vienna",
    "Oslo",
    "Lisbon",
    "Tokyo",
    "Cairo",
    "Athens",
    "Dublin",
    "Prague",
    "Warsaw",
    "Delhi",
    "Lima",
    "Quito",
    "Beijing",
    "Ottawa",
    "Moscow",
]
ASKED = [form % city for city in CITIES for form in ("What is the weather in %s?", "How is the weather in %s?")]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
OF_A_CITY = [
    {"type": "function", "function": {"name": f"get_{what}", "description": f"Get the {what} in a city.", "parameters": CITY}}
    for what in ("weather", "time")
]


@pytest.mark.parametrize("num_prompts", [2, pytest.param(40, marks=pytest.mark.slow)])
def test_a_call_that_must_be_made_is_the_one_that_would_be_made(client: openai.OpenAI, num_prompts: int) -> None:
    for prompt in ASKED[:num_prompts]:
        ask: dict[str, Any] = {**GREEDY, "messages": [{"role": "user", "content": prompt}], "tools": OF_A_CITY}
        auto = client.chat.completions.create(**ask).choices[0]
        assert len(auto.message.tool_calls) == 1 and auto.finish_reason == "tool_calls", prompt
        for choice, parallel in itertools.product(("required", NAMED), ({}, {"parallel_tool_calls": True}, ONE_CALL)):
            forced = {**ask, "tool_choice": choice, **parallel}
            with client.chat.completions.stream(**forced) as stream:
                streamed = stream.get_final_completion().choices[0]
            for got in (client.chat.completions.create(**forced).choices[0], streamed):
                assert made(got) == made(auto), (prompt, choice, parallel)


TWO_CITIES = [
    ("What is the weather in Paris and in Rome?", ("Paris", "Rome")),
    pytest.param("Tell me the weather in Oslo and Cairo.", ("Oslo", "Cairo"), marks=pytest.mark.slow),
]
PARALLEL: list[dict[str, Any]] = [{}, {"parallel_tool_calls": True}]


@pytest.mark.parametrize(("prompt", "cities"), TWO_CITIES)
def test_two_cities_are_two_calls_where_several_are_allowed(
    client: openai.OpenAI, prompt: str, cities: tuple[str, str]
) -> None:
    ask: dict[str, Any] = {**GREEDY, "messages": [{"role": "user", "content": prompt}], "tools": OF_A_CITY}
    calls = [("get_weather", json.dumps({"city": city})) for city in cities]
    several = list(itertools.product(("auto", "required"), PARALLEL))
    single = [("auto", ONE_CALL), ("required", ONE_CALL), *itertools.product([NAMED], (*PARALLEL, ONE_CALL))]
    for choice, parallel in several + single:
        asked = {**ask, "tool_choice": choice, **parallel}
        with client.chat.completions.stream(**asked) as stream:
            streamed = stream.get_final_completion().choices[0]
        wanted = ("tool_calls", None, calls if (choice, parallel) in several else calls[:1])
        assert made(streamed) == made(client.chat.completions.create(**asked).choices[0]) == wanted, (choice, parallel)


def made(choice: Any) -> Any:
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
    return choice.finish_reason, choice.message.content, calls


def test_an_answer_without_a_call_is_free_beside_strict_tools(client: openai.OpenAI) -> None:
    ask = {**GREEDY, "messages": [{"role": "user", "content": "Add 3 and 5"}], "tools": [WEATHER]}
    message = client.chat.completions.parse(**ask).choices[0].message
    assert message.content == "8" and not message.tool_calls


def test_structural_tags_of_both_shapes(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99, "minimum": 0}}, "required": ["n"]}
    content = {"type": "json_schema", "json_schema": {**schema, "additionalProperties": False}}
    tag = {"type": "tag", "begin": "<n>", "content": content, "end": "</n>"}
    shapes: list[dict[str, Any]] = [
        {
            "format": {
                "type": "triggered_tags",
                "triggers": ["<n>"],
                "tags": [tag],
                "at_least_one": True,
                "stop_after_first": True,
            }
        },
        {"structures": [{"begin": "<n>", "schema": content["json_schema"], "end": "</n>"}], "triggers": ["<n>"]},
    ]
    for shape in shapes:
        text = client.chat.completions.create(
            messages=[{"role": "user", "content": "Hi"}], **GREEDY, response_format={"type": "structural_tag", **shape}
        )  # type: ignore[call-overload]
        text = text.choices[0].message.content
        if "format" in shape:
            assert text.startswith("<n>") and text.endswith("</n>") and 0 <= json.loads(text[3:-4])["n"] <= 99
        also = client.completions.create(
            prompt="Hi", **GREEDY, extra_body={"structured_outputs": {"structural_tag": {"type": "structural_tag", **shape}}}
        )
        assert ("format" not in shape) or also.choices[0].text.startswith("<n>")


@pytest.mark.parametrize(
    ("extra", "param", "text"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"items": {"type": "x"}}}}},
         "response_format", "response_format.json_schema.schema: at #/items: "),
        ({"response_format": {"type": "structural_tag", "format": {"type": "token"}}}, "response_format", "format.type: "),
        ({"extra_body": {"guided_regex": "a("}}, "guided_regex", "unclosed group"),
        ({"extra_body": {"structured_outputs": {"grammar": 'start: "a" b'}}}, "structured_outputs", "1(8)"),
        ({"tools": [WEATHER, {"type": "function", "function": {"name": "f", "strict": True, "parameters": {
            "type": "object", "properties": {"a": {"type": "array", "contains": {}}}}}}]},
         "tools[1].function.parameters", "at #/properties/a: "),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {
            "type": "object", "properties": {"a": {"type": "array", "items": 3}}}}}], "tool_choice": "required"},
         "tools[0].function.parameters", "at #/properties/a: "),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_an_error_names_the_field_and_the_place(client: openai.OpenAI, extra: Any, param: str, text: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(messages=IN_PARIS, **GREEDY, **extra)
    assert caught.value.param == param and text in str(caught.value), caught.value

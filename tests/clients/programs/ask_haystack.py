"""Haystack's OpenAIChatGenerator."""

from asks import BASE_URL, CHAT, KEY, MAX_TOKENS, MODEL, PERSON, WEATHER, WEATHER_FUNCTION, Found, Person
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import Tool
from haystack.utils import Secret

found = Found("haystack-ai")
options = {"temperature": 0, "max_tokens": MAX_TOKENS}
generator = OpenAIChatGenerator(Secret.from_token(KEY), MODEL, api_base_url=f"{BASE_URL}/v1", max_retries=0)


def ask(text: str, more: dict | None = None, **arguments):
    (reply,) = generator.run([ChatMessage.from_user(text)], generation_kwargs={**options, **(more or {})}, **arguments)[
        "replies"
    ]
    return reply


parts = []
streamed = ask(CHAT, streaming_callback=lambda chunk: parts.append(chunk.content))
assert streamed.text == "".join(parts), (streamed, parts)
found.chat(ask(CHAT).text, parts)
(call,) = ask(WEATHER, tools=[Tool(**WEATHER_FUNCTION, function=lambda city: "5")]).tool_calls
found.tool(call.tool_name, call.arguments)
found.structured(ask(PERSON, {"response_format": Person}).text)
found.say()

"""Pydantic AI: an agent with a tool, a stream, and a class by native output (the server holds the answer to the schema)."""

import asyncio

from asks import BASE_URL, CHAT, KEY, MAX_TOKENS, MODEL, PERSON, WEATHER, Found, Person
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

calls = []


def get_weather(city: str) -> str:
    """Get the weather of a city."""
    calls.append({"city": city})
    return "5"


async def main() -> None:
    found = Found("pydantic-ai-slim")
    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{BASE_URL}/v1", api_key=KEY))
    options = {"model_settings": {"temperature": 0, "max_tokens": MAX_TOKENS}, "retries": 0}
    plain = Agent(model, **options)
    whole = (await plain.run(CHAT)).output
    async with plain.run_stream(CHAT) as stream:
        found.chat(whole, [part async for part in stream.stream_text(delta=True, debounce_by=None)])
    result = await Agent(model, tools=[get_weather], **options).run(WEATHER)
    assert calls and result.output, result
    found.tool("get_weather", calls[0])
    found.structured((await Agent(model, output_type=NativeOutput(Person), **options).run(PERSON)).output)
    found.say()


asyncio.run(main())

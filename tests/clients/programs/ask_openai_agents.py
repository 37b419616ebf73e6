"""OpenAI's Agents SDK (openai-agents) over /v1/responses, its own way: a loop with a tool, a stream, a structured answer."""

import asyncio

from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from asks import BASE_URL, CHAT, KEY, MAX_TOKENS, MODEL, PERSON, WEATHER, Found, Person
from openai import AsyncOpenAI

calls = []


@function_tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    calls.append({"city": city})
    return "5"


async def main() -> None:
    set_tracing_disabled(True)
    found = Found("openai-agents")
    client = AsyncOpenAI(base_url=f"{BASE_URL}/v1", api_key=KEY, max_retries=0)
    model = OpenAIResponsesModel(MODEL, client)
    options = {"name": "assistant", "model": model, "model_settings": ModelSettings(temperature=0, max_tokens=MAX_TOKENS)}
    plain = Agent(**options)
    whole = (await Runner.run(plain, CHAT)).final_output
    run = Runner.run_streamed(plain, CHAT)
    parts = []
    async for event in run.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            parts.append(event.data.delta)
    assert run.final_output == "".join(parts), (run.final_output, parts)
    found.chat(whole, parts)
    result = await Runner.run(Agent(tools=[get_weather], **options), WEATHER)
    assert calls and result.final_output, result
    found.tool("get_weather", calls[0])
    found.structured((await Runner.run(Agent(output_type=Person, **options), PERSON)).final_output)
    found.say()


asyncio.run(main())

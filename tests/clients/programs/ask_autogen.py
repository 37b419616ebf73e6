"""AutoGen: its OpenAIChatCompletionClient, and an agent with a tool."""

import asyncio

from asks import BASE_URL, CHAT, KEY, MAX_TOKENS, MODEL, PERSON, WEATHER, Found, Person
from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import CreateResult, ModelFamily, ModelInfo, UserMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient

INFO = ModelInfo(vision=False, function_calling=True, json_output=True, family=ModelFamily.UNKNOWN, structured_output=True)
calls = []


async def get_weather(city: str) -> str:
    """Get the weather of a city."""
    calls.append({"city": city})
    return "5"


async def main() -> None:
    found = Found("autogen-agentchat", "autogen-ext")
    client = OpenAIChatCompletionClient(
        model=MODEL,
        base_url=f"{BASE_URL}/v1",
        api_key=KEY,
        model_info=INFO,
        temperature=0,
        max_tokens=MAX_TOKENS,
        max_retries=0,
    )
    asked = [UserMessage(content=CHAT, source="user")]
    *parts, last = [part async for part in client.create_stream(asked)]
    assert isinstance(last, CreateResult) and last.content == "".join(parts), (last, parts)
    found.chat((await client.create(asked)).content, parts)
    agent = AssistantAgent("assistant", client, tools=[get_weather], system_message=None, reflect_on_tool_use=True)
    result = await agent.run(task=WEATHER)
    assert calls and result.messages[-1].content, result
    found.tool("get_weather", calls[0])
    person = await client.create([UserMessage(content=PERSON, source="user")], json_output=Person)
    found.structured(person.content)
    found.say()


asyncio.run(main())

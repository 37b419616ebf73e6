"""Semantic Kernel: a kernel with OpenAIChatCompletion, a function that it calls by itself, and a class."""

import asyncio
from typing import Annotated

from asks import BASE_URL, CHAT, KEY, MAX_TOKENS, MODEL, PERSON, WEATHER, Found, Person
from openai import AsyncOpenAI
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function

calls = []


class Weather:
    """A plug-in, which is what a kernel's functions are part of."""

    @kernel_function(name="get_weather", description="Get the weather of a city.")
    def get_weather(self, city: Annotated[str, "the city"]) -> str:
        calls.append({"city": city})
        return "5"


def asked(text: str) -> ChatHistory:
    history = ChatHistory()
    history.add_user_message(text)
    return history


def settings(**fields) -> OpenAIChatPromptExecutionSettings:
    return OpenAIChatPromptExecutionSettings(temperature=0, max_tokens=MAX_TOKENS, **fields)


async def main() -> None:
    found = Found("semantic-kernel")
    client = AsyncOpenAI(base_url=f"{BASE_URL}/v1", api_key=KEY, max_retries=0)
    service = OpenAIChatCompletion(ai_model_id=MODEL, async_client=client)
    kernel = Kernel(services=[service])
    whole = await service.get_chat_message_content(asked(CHAT), settings())
    parts = [str(part) async for part in service.get_streaming_chat_message_content(asked(CHAT), settings())]
    found.chat(str(whole), parts)
    kernel.add_plugin(Weather(), "weather")
    calling = settings(function_choice_behavior=FunctionChoiceBehavior.Required())
    await service.get_chat_message_content(asked(WEATHER), calling, kernel=kernel)
    found.tool("get_weather", calls[0])
    found.structured(str(await service.get_chat_message_content(asked(PERSON), settings(response_format=Person))))
    found.say()


asyncio.run(main())

"""smolagents' OpenAIModel: chats, a tool that it may call, and a response format. Its agents are loops around these."""

from asks import BASE_URL, CHAT, KEY, MAX_TOKENS, MODEL, PERSON, PERSON_SCHEMA, WEATHER, Found, messages
from smolagents import OpenAIModel, tool


@tool
def get_weather(city: str) -> str:
    """Get the weather of a city.

    Args:
        city: its name
    """
    return "5"


found = Found("smolagents")
model = OpenAIModel(MODEL, f"{BASE_URL}/v1", KEY, client_kwargs={"max_retries": 0}, temperature=0, max_tokens=MAX_TOKENS)
found.chat(model.generate(messages(CHAT)).content, [part.content for part in model.generate_stream(messages(CHAT))])
(call,) = model.generate(messages(WEATHER), tools_to_call_from=[get_weather]).tool_calls
found.tool(call.function.name, call.function.arguments)
form = {"type": "json_schema", "json_schema": {"name": "Person", "schema": PERSON_SCHEMA}}
found.structured(model.generate(messages(PERSON), response_format=form).content)
found.say()

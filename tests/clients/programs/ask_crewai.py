"""CrewAI: its LLM for an OpenAI-compatible server."""

import os

os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true", "CREWAI_TRACING_ENABLED": "false"}

from asks import BASE_URL, CHAT, KEY, MAX_TOKENS, MODEL, PERSON, WEATHER, WEATHER_TOOL, Found, Person
from crewai import LLM
from crewai.events import LLMStreamChunkEvent, crewai_event_bus

found = Found("crewai")
calls, parts = [], []


@crewai_event_bus.on(LLMStreamChunkEvent)
def keep(source: object, event: LLMStreamChunkEvent) -> None:
    parts.append(event.chunk)


def get_weather(city: str) -> str:
    calls.append({"city": city})
    return "5"


def model(**options) -> LLM:
    where = {"model": MODEL, "custom_openai": True, "base_url": f"{BASE_URL}/v1", "api_key": KEY}
    return LLM(**where, temperature=0, max_tokens=MAX_TOKENS, **options)


whole = model().call(CHAT)
streamed = model(stream=True).call(CHAT)
crewai_event_bus.flush()
assert streamed == "".join(parts), (streamed, parts)
found.chat(whole, parts)
model().call(WEATHER, tools=[WEATHER_TOOL], available_functions={"get_weather": get_weather})
found.tool("get_weather", calls[0])
found.structured(model(response_format=Person).call(PERSON))
found.say()

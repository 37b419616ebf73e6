"""LangChain's ChatOpenAI of the package langchain-openai."""

from asks import BASE_URL, CHAT, KEY, MAX_TOKENS, MODEL, PERSON, WEATHER, WEATHER_TOOL, Found, Person
from langchain_openai import ChatOpenAI

found = Found("langchain-openai")
model = ChatOpenAI(model=MODEL, base_url=f"{BASE_URL}/v1", api_key=KEY, max_retries=0, temperature=0, max_tokens=MAX_TOKENS)
found.chat(model.invoke(CHAT).text, [chunk.text for chunk in model.stream(CHAT)])
(call,) = model.bind_tools([WEATHER_TOOL]).invoke(WEATHER).tool_calls
found.tool(call["name"], call["args"])
found.structured(model.with_structured_output(Person, method="json_schema").invoke(PERSON))
found.say()

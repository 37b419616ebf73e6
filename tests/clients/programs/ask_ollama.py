"""The package ollama, over /api."""

import ollama
from asks import BASE_URL, CHAT, KEY, MAX_TOKENS, MODEL, PERSON, PERSON_SCHEMA, WEATHER, WEATHER_TOOL, Found, messages

found = Found("ollama")
client = ollama.Client(BASE_URL, headers={"Authorization": f"Bearer {KEY}"})
options = {"model": MODEL, "options": {"temperature": 0, "num_predict": MAX_TOKENS}}
whole = client.chat(messages=messages(CHAT), **options).message.content
found.chat(whole, [part.message.content for part in client.chat(messages=messages(CHAT), stream=True, **options)])
(call,) = client.chat(messages=messages(WEATHER), tools=[WEATHER_TOOL], **options).message.tool_calls
found.tool(call.function.name, call.function.arguments)
found.structured(client.chat(messages=messages(PERSON), format=PERSON_SCHEMA, **options).message.content)
found.say()

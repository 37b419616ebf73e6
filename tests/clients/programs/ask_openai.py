"""The package openai: chat completions."""

import openai
from asks import BASE_URL, CHAT, KEY, MAX_TOKENS, MODEL, PERSON, WEATHER, WEATHER_TOOL, Found, Person, messages

found = Found("openai")
client = openai.OpenAI(base_url=f"{BASE_URL}/v1", api_key=KEY, max_retries=0)
options = {"model": MODEL, "temperature": 0, "max_tokens": MAX_TOKENS}
whole = client.chat.completions.create(messages=messages(CHAT), **options).choices[0].message.content
stream = client.chat.completions.create(messages=messages(CHAT), stream=True, **options)
found.chat(whole, [chunk.choices[0].delta.content for chunk in stream])
answer = client.chat.completions.create(messages=messages(WEATHER), tools=[WEATHER_TOOL], **options).choices[0].message
(call,) = answer.tool_calls
found.tool(call.function.name, call.function.arguments)
parsed = client.chat.completions.parse(messages=messages(PERSON), response_format=Person, **options)
found.structured(parsed.choices[0].message.parsed)
found.say()

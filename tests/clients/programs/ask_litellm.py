"""LiteLLM, by its provider hosted_vllm."""

import litellm
from asks import BASE_URL, CHAT, KEY, MAX_TOKENS, MODEL, PERSON, WEATHER, WEATHER_TOOL, Found, Person, messages

found = Found("litellm")
options = {
    "model": f"hosted_vllm/{MODEL}",
    "api_base": f"{BASE_URL}/v1",
    "api_key": KEY,
    "temperature": 0,
    "max_tokens": MAX_TOKENS,
    "num_retries": 0,
}
whole = litellm.completion(messages=messages(CHAT), **options).choices[0].message.content
stream = litellm.completion(messages=messages(CHAT), stream=True, **options)
found.chat(whole, [chunk.choices[0].delta.content for chunk in stream])
(call,) = litellm.completion(messages=messages(WEATHER), tools=[WEATHER_TOOL], **options).choices[0].message.tool_calls
found.tool(call.function.name, call.function.arguments)
answer = litellm.completion(messages=messages(PERSON), response_format=Person, **options)
found.structured(answer.choices[0].message.content)
found.say()

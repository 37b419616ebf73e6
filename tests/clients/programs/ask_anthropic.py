"""The package anthropic: messages."""

import anthropic
from asks import BASE_URL, CHAT, KEY, MAX_TOKENS, MODEL, PERSON, WEATHER, WEATHER_FUNCTION, Found, Person, messages

found = Found("anthropic")
client = anthropic.Anthropic(base_url=BASE_URL, api_key=KEY, max_retries=0)
options = {"model": MODEL, "max_tokens": MAX_TOKENS}
whole = client.messages.create(messages=messages(CHAT), **options).content[0].text
with client.messages.stream(messages=messages(CHAT), **options) as stream:
    found.chat(whole, list(stream.text_stream))
function = dict(WEATHER_FUNCTION)
tool = {"input_schema": function.pop("parameters"), **function}
(call,) = client.messages.create(messages=messages(WEATHER), tools=[tool], **options).content
found.tool(call.name, call.input)
found.structured(client.messages.parse(messages=messages(PERSON), output_format=Person, **options).parsed_output)
found.say()

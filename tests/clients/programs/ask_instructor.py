"""instructor: a class by its modes TOOLS (a call that the server holds to the schema) and JSON_SCHEMA, at once and in parts."""

import instructor
import openai
from asks import BASE_URL, CHAT, KEY, MAX_TOKENS, MODEL, PERSON, WEATHER, Found, Person, messages
from pydantic import BaseModel

found = Found("instructor")
plain = openai.OpenAI(base_url=f"{BASE_URL}/v1", api_key=KEY, max_retries=0)
options = {"model": MODEL, "temperature": 0, "max_tokens": MAX_TOKENS}


class get_weather(BaseModel):
    """Get the weather of a city."""

    city: str


client = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
called = client.chat.completions.create(messages=messages(WEATHER), response_model=get_weather, max_retries=0, **options)
found.tool(type(called).__name__, called.model_dump())
client = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
person = client.chat.completions.create(messages=messages(PERSON), response_model=Person, max_retries=0, **options)
*_, last = client.chat.completions.create_partial(messages=messages(PERSON), response_model=Person, max_retries=0, **options)
assert last.model_dump() == person.model_dump(), (last, person)
found.structured(person)
whole = client.chat.completions.create(messages=messages(CHAT), response_model=None, **options).choices[0].message.content
stream = client.chat.completions.create(messages=messages(CHAT), response_model=None, stream=True, **options)
found.chat(whole, [chunk.choices[0].delta.content for chunk in stream])
found.say()

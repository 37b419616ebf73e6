"""outlines: from_vllm, which sends structured_outputs. It has no tools."""

import openai
import outlines
from asks import BASE_URL, CHAT, KEY, MAX_TOKENS, MODEL, PERSON, Found, Person

found = Found("outlines")
model = outlines.from_vllm(openai.OpenAI(base_url=f"{BASE_URL}/v1", api_key=KEY, max_retries=0), MODEL)
options = {"temperature": 0, "max_tokens": MAX_TOKENS}
found.chat(model(CHAT, **options), model.stream(CHAT, **options))
found.structured(Person.model_validate_json(model(PERSON, Person, **options)))
found.say()

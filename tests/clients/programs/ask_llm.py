"""llm, Simon Willison's command and package: a model of extra-openai-models.yaml."""

import os
import tempfile
from pathlib import Path

from asks import BASE_URL, CHAT, KEY, MAX_TOKENS, MODEL, PERSON, WEATHER, Found, Person

folder = tempfile.TemporaryDirectory()
os.environ["LLM_USER_PATH"] = folder.name
Path(folder.name, "extra-openai-models.yaml").write_text(
    f"- model_id: quire\n  model_name: {MODEL}\n  api_base: {BASE_URL}/v1\n  api_key_name: quire\n"
    "  supports_schema: true\n  supports_tools: true\n"
)

import llm  # noqa: E402  reads LLM_USER_PATH and the file

calls = []


def get_weather(city: str) -> str:
    """Get the weather of a city."""
    calls.append({"city": city})
    return "5"


found = Found("llm")
model = llm.get_model("quire")
options = {"key": KEY, "temperature": 0, "max_tokens": MAX_TOKENS}
found.chat(model.prompt(CHAT, stream=False, **options).text(), list(model.prompt(CHAT, stream=True, **options)))
answers = list(model.chain(WEATHER, tools=[get_weather], key=KEY, options={"temperature": 0, "max_tokens": MAX_TOKENS}))
assert answers and calls, (answers, calls)
found.tool("get_weather", calls[0])
found.structured(model.prompt(PERSON, schema=Person, stream=False, **options).text())
found.say()

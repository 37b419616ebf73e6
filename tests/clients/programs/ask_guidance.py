"""guidance: its VLLMModel, which always streams and sends grammars."""

from asks import BASE_URL, CHAT, KEY, MODEL, PERSON, WEATHER, Found, Person
from guidance import assistant, gen, guidance, json, user
from guidance.models.experimental import VLLMModel

calls = []


def get_weather(city: str) -> str:
    """Get the weather of a city."""
    calls.append({"city": city})
    return "5"


found = Found("guidance")
model = VLLMModel(MODEL, base_url=f"{BASE_URL}/v1", api_key=KEY)


@guidance
def asked(lm, text, node):
    with user():
        lm += text
    with assistant():
        lm += node
    return lm


def sentence():
    return gen("answer", temperature=0, regex="[A-Z][a-z ]{20,40}[.]")


whole = model + asked(CHAT, sentence())
texts = [str(state) for state in model.stream() + asked(CHAT, sentence())]
found.chat(str(whole), [text.removeprefix(before) for before, text in zip(["", *texts], texts, strict=False)])
found.structured((model + asked(PERSON, json("answer", schema=Person, temperature=0)))["answer"])
model + asked(WEATHER, gen(tools=[get_weather]))
found.tool("get_weather", calls[0])
found.say()

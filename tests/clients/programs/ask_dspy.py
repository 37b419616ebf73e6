"""DSPy: a signature whose fields the JSON adapter asks for by a schema, streamed too; and a tool by its LM."""

import asyncio
import json
import logging
from typing import Literal

import dspy
from asks import BASE_URL, KEY, MAX_TOKENS, MODEL, PERSON, WEATHER, WEATHER_TOOL, Found, Person, messages
from dspy.lm15 import AccessPolicy, EndpointSupport, ModelSupport, OpenAIChatCompat, ProviderDefinition, register_provider

logging.disable(logging.WARNING)
Word = Literal["yes, it is", "no, it is not"]


async def streamed(predict: dspy.Predict, **inputs: str) -> tuple[str, list[str]]:
    listener = dspy.streaming.StreamListener(signature_field_name="answer")
    parts, last = [], None
    async for item in dspy.streamify(predict, stream_listeners=[listener], async_streaming=True)(**inputs):
        if isinstance(item, dspy.streaming.StreamResponse):
            parts.append(item.chunk)
        elif isinstance(item, dspy.Prediction):
            last = item.answer
    return last, parts


found = Found("dspy")
# A model that DSPy has not heard of is asked for no schema unless its provider is declared.
access = AccessPolicy("quire", EndpointSupport(complete=True, stream=True), auth_modes=("bearer",), base_url=f"{BASE_URL}/v1")
definition = ProviderDefinition.chat(access, compat=OpenAIChatCompat.preset("vllm"))
register_provider(definition, supports=ModelSupport(function_calling=True, response_schema=True))
lm = dspy.LM(f"quire/{MODEL}", api_key=KEY, temperature=0, max_tokens=MAX_TOKENS, cache=False, num_retries=0)
dspy.configure(lm=lm, adapter=dspy.JSONAdapter())
predict = dspy.Predict(dspy.Signature("question: str -> answer: str").with_updated_fields("answer", type_=Word))
whole = predict(question="Is a dog an animal?").answer
last, parts = asyncio.run(streamed(predict, question="Is a dog an animal?"))
# The parts are those of the JSON text, in which blanks may stand around the value.
found.chat(json.dumps(whole), [parts[0].lstrip(), "".join(parts[1:]).rstrip()])
(answer,) = lm(messages=messages(WEATHER), tools=[WEATHER_TOOL])
(call,) = answer["tool_calls"]
found.tool(call["function"]["name"], call["function"]["arguments"])
person = dspy.Predict(dspy.Signature("question: str -> person: str").with_updated_fields("person", type_=Person))
found.structured(person(question=PERSON).person)
found.say()

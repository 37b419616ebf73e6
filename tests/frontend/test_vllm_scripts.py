"""Short scripts in the shapes of vLLM's documentation, with the first word of their imports changed: each runs as it is."""

import subprocess
import sys
import textwrap

import pytest

OFFLINE = """
from quire import LLM, SamplingParams

def main():
    llm = LLM(seed=1, max_model_len=256)
    params = SamplingParams(temperature=0.8, top_p=0.95)
    for output in llm.generate(["Hello, my name is", "The capital of France is"], params):
        print(f"Prompt: {output.prompt!r}, Generated text: {output.outputs[0].text!r}")
        assert output.finished and output.outputs[0].finish_reason in ("stop", "length")
        assert output.lora_request is output.outputs[0].lora_request is output.kv_transfer_params is None
    tokenizer = llm.get_tokenizer()
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(tokenizer.eos_token)]
    assert ends[0] == ends[1] and tokenizer.convert_tokens_to_ids(["no such token"]) == [None]
    params = llm.get_default_sampling_params()
    params.max_tokens, params.logprobs, params.stop_token_ids = 5, 2, ends
    (output,) = llm.generate(text, sampling_params=params, use_tqdm=False)
    for position in output.outputs[0].logprobs:
        assert all(token.rank >= 1 and token.logprob <= 0 for token in position.values())
    assert llm.llm_engine.model_config.max_model_len == 256

if __name__ == "__main__":
    main()
"""
TOOLS = """
import json
from quire import LLM
from quire.sampling_params import SamplingParams

params = SamplingParams(max_tokens=128, temperature=0.0)
llm = LLM()
weather = {"name": "get_weather", "description": "Get the weather in a city", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}
tools = [{"type": "function", "function": weather}]
messages = [{"role": "user", "content": "What is the weather in Paris?"}]
output = llm.chat(messages, sampling_params=params, tools=tools)[0].outputs[0].text.strip()
call = json.loads(output.removeprefix("<tool_call>").removesuffix("</tool_call>"))
assert call["name"] and isinstance(call["arguments"], dict), output
messages.append({"role": "assistant", "content": output})
messages.append({"role": "tool", "content": "It is sunny.", "tool_call_id": "123456789"})
assert llm.chat(messages, params, tools=tools)[0].outputs[0].token_ids
assert len(llm.chat([messages[:1]] * 3, params, use_tqdm=True, chat_template_content_format="openai")) == 3
"""
STRUCTURED = """
import json, re
from enum import Enum
from pydantic import BaseModel
from quire import LLM, SamplingParams
from quire.sampling_params import StructuredOutputsParams

class Kind(str, Enum):
    sedan = "sedan"
    coupe = "coupe"

class Car(BaseModel):
    brand: Kind
    wheels: bool

SQL = '''
root ::= "SELECT " column " from " table
column ::= "col_1" | "col_2"
table ::= "table_1" | "table_2"
'''
CALL = {"begin": "<f>", "schema": {"type": "boolean"}, "end": "</f>"}
TAG = {"type": "structural_tag", "structures": [CALL], "triggers": ["<f>"]}

llm = LLM(max_model_len=256)

def answer(given: StructuredOutputsParams | None, **options) -> str:
    assert isinstance(given, StructuredOutputsParams)
    params = SamplingParams(structured_outputs=given, max_tokens=60, temperature=0.0, **options)
    assert isinstance(params.structured_outputs, StructuredOutputsParams)
    return llm.generate("The car:", sampling_params=params)[0].outputs[0].text

schema = Car.model_json_schema()
by_json = StructuredOutputsParams(json=schema)
assert by_json.json == schema and by_json.choice is None
Car.model_validate_json(answer(by_json))
Car.model_validate_json(answer(StructuredOutputsParams(json=json.dumps(schema), disable_any_whitespace=True)))
assert answer(StructuredOutputsParams(choice=["Positive", "Negative"])) in ("Positive", "Negative")
assert re.fullmatch("[a-c]{3}@x\\\\.com", answer(StructuredOutputsParams(regex="[a-c]{3}@x\\\\.com\\n"), stop=["\\n"]))
assert answer(StructuredOutputsParams(grammar=SQL)).startswith("SELECT col_")
assert answer(StructuredOutputsParams(json_object=True)).startswith("{")
answer(StructuredOutputsParams(structural_tag=json.dumps(TAG)))
try:
    StructuredOutputsParams(json=schema, regex="a")
except ValueError as error:
    assert "json, regex" in str(error)
else:
    raise AssertionError("two constraints at once")
"""
BEAMS = """
from quire import LLM
from quire.sampling_params import BeamSearchParams

llm = LLM(model=None)
params = BeamSearchParams(beam_width=5, max_tokens=8)
for output in llm.beam_search([{"prompt": "Hello, my name is "}, {"prompt": "The cat"}], params, lora_request=None):
    best = output.sequences[0]
    assert len(output.sequences) == 5 and best.text and best.tokens and best.cum_logprob <= 0, best
(one,) = llm.beam_search("The cat", params, None, False, concurrency_limit=1, mm_processor_kwargs=None)
assert one.sequences[0].tokens == best.tokens
"""
STREAMING = """
import asyncio
from quire import SamplingParams
from quire.engine.arg_utils import AsyncEngineArgs
from quire.sampling_params import BeamSearchParams, RequestOutputKind
from quire.v1.engine.async_llm import AsyncLLM

async def stream(engine: AsyncLLM, prompt: str, request_id: str) -> int:
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=42, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    pieces = []
    async for output in engine.generate(request_id=request_id, prompt=prompt, sampling_params=params):
        for completion in output.outputs:
            pieces += completion.token_ids
        if output.finished:
            break
    return len(pieces)

async def main():
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=None, enforce_eager=True))
    try:
        prompts = ["The future of AI is", "In a galaxy far away", "The key is"]
        assert await asyncio.gather(*(stream(engine, p, f"stream-{i}") for i, p in enumerate(prompts))) == [40] * 3
        assert (await engine.get_model_config()).max_model_len == engine.model_config.max_model_len
        assert (await engine.get_tokenizer()).encode("a")
        found = await engine.beam_search("a", params=BeamSearchParams(2, 2), lora_request=None)
        assert len(found.sequences) == 2
    finally:
        engine.shutdown()

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.parametrize(
    "script",
    [OFFLINE, pytest.param(TOOLS, marks=pytest.mark.slow), STRUCTURED, pytest.param(BEAMS, marks=pytest.mark.slow), STREAMING],
    ids=["offline", "tools", "structured", "beams", "streaming"],
)
def test_a_script_for_vllm_runs(tmp_path, script):
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(script))
    done = subprocess.run([sys.executable, "-P", path], cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

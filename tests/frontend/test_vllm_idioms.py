"""Idioms of vLLM's scripts beyond its engines: tokenizers, imported names, forks, and options that are written otherwise."""

import os
import signal
import warnings
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from quire import LLM, EngineArgs, PoolingParams, SamplingParams
from quire.config import CompilationConfig
from quire.distributed import cleanup_dist_env_and_memory
from quire.enginecore.loading.model_files import BUNDLED
from quire.frontend.client.stream import EngineDown
from quire.frontend.client.transformers_tokenizer import transformers_tokenizer
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.config import EngineConfig
from quire.lora.request import LoRARequest
from quire.sampling_params import GuidedDecodingParams
from quire.usage.usage_lib import UsageContext
from quire.utils import Counter, random_uuid

SMALL = {"device": "cpu", "dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "cpu_kv_cache_gib": 0.05}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM.from_engine_args(EngineArgs(**SMALL)) as llm:
        yield llm


def test_its_tokenizer_is_transformers_own(llm):
    tokenizer = llm.get_tokenizer()
    assert len(tokenizer) == len(tokenizer.get_vocab()) > 256 and tokenizer.chat_template
    ids = tokenizer("The cat")["input_ids"]
    assert ids == llm.generate("The cat", GREEDY, use_tqdm=False)[0].prompt_token_ids
    assert tokenizer.batch_decode([ids], skip_special_tokens=True) == ["The cat"]
    assert tokenizer.convert_tokens_to_ids(tokenizer.convert_ids_to_tokens(ids)) == ids
    assert tokenizer.tokenize("The cat") and tokenizer.pad_token_id is not None


def test_a_tokenizer_that_transformers_cannot_read_is_wrapped(llm, tmp_path):
    files = {name: (BUNDLED / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}
    template = BUNDLED / "chat_template.jinja"
    files |= {template.name: template.read_bytes()} if template.exists() else {}
    own = Tokenizer.from_files(files)
    wrapped = transformers_tokenizer(EngineConfig(model=str(tmp_path)), SimpleNamespace(tokenizer=own))
    assert wrapped("The cat")["input_ids"] == own.encode("The cat")
    chat = [{"role": "user", "content": "Hi"}]
    assert wrapped.apply_chat_template(chat, tokenize=False) == llm.get_tokenizer().apply_chat_template(chat, tokenize=False)


def test_a_forked_child_hears_that_it_cannot_use_the_engine(llm):
    reads, writes = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of a fork beside threads
        child = os.fork()
    if child == 0:
        try:
            llm.generate("The cat", GREEDY, use_tqdm=False)
            os.write(writes, b"no error")
        except EngineDown as error:
            os.write(writes, str(error).encode())
        finally:
            os.kill(os.getpid(), signal.SIGKILL)  # no clean-up of the parent's things
    os.waitpid(child, 0)
    assert b"cannot be used in a fork" in os.read(reads, 1000)
    os.close(reads)
    os.close(writes)
    assert llm.generate("The cat", GREEDY, use_tqdm=False)[0].finished


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda llm: llm.generate(prompt_token_ids=[[1, 2]]), ValueError, "give token ids as a prompt"),
        (lambda llm: llm.generate("a", logits_processors=[print]), ValueError, r"LLM\(logits_processors=\[...\]\)"),
        (lambda llm: llm.generate(), ValueError, "needs prompts"),
        (lambda _: SamplingParams(logits_processors=[print]), ValueError, "extra_args"),
        (lambda _: SamplingParams(best_of=3), ValueError, "use n"),
        (lambda _: SamplingParams(temprature=0), ValueError, "did you mean temperature"),
        (lambda _: SamplingParams(abacus=0), ValueError, "there are n, temperature"),
        (lambda _: LoRARequest("a", 1, "folder", None, {}), NotImplementedError, "LoRARequest: adapters are read from"),
        (lambda _: PoolingParams(task="score"), ValueError, "write classify or embed"),
    ],
)
def test_what_is_written_otherwise_here_is_said(llm, call, error, text):
    with pytest.raises(error, match=text):
        call(llm)


def test_older_names_of_constraints_work(llm):
    guided = SamplingParams(max_tokens=8, guided_decoding=GuidedDecodingParams(choice=["yes", "no"]))
    assert llm.generate("Is it?", guided, use_tqdm=False)[0].outputs[0].text in ("yes", "no")


def test_an_engine_gives_as_many_logprobs_as_its_option_says(llm):
    with LLM(**SMALL, max_logprobs=-1) as wide:
        assert wide.model_config.max_logprobs == 128
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=100, prompt_logprobs=50)
        output = wide.generate("The cat sat", params, use_tqdm=False)[0]
    completion, prompt = output.outputs[0], output.prompt_logprobs
    assert [len(row) for row in completion.logprobs] == [100] * 4
    assert prompt[0] is None and {len(row) for row in prompt[1:]} <= {50, 51}
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=20)
    usual = llm.generate("The cat sat", params, use_tqdm=False)[0].outputs[0]
    for row, twenty in zip(completion.logprobs, usual.logprobs, strict=True):
        assert [token.rank for token in row.values()] == list(range(1, 101))
        assert list(row)[:20] == list(twenty)
        assert [token.logprob for token in twenty.values()] == pytest.approx([row[i].logprob for i in twenty], abs=1e-4)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=-1, prompt_logprobs=-1)
    most = llm.generate("The cat sat", params, use_tqdm=False)[0]
    assert [list(row) for row in most.outputs[0].logprobs] == [list(row) for row in usual.logprobs]
    assert {len(row) for row in most.prompt_logprobs[1:]} <= {20, 21} and params.logprobs == -1
    with pytest.raises(ValueError, match="logprobs must be at least -1 and at most 128, got -2"):
        SamplingParams(logprobs=-2)
    with pytest.raises(ValueError, match="logprobs must be at most 20, got 50"):
        llm.generate("The cat sat", SamplingParams(logprobs=50), use_tqdm=False)


def test_small_tools_of_scripts():
    counter = Counter()
    assert [next(counter), next(counter)] == [0, 1] and len(random_uuid()) == 32 != random_uuid()
    assert cleanup_dist_env_and_memory(shutdown_ray=True) is None
    assert CompilationConfig(mode=3).mode == 3 and UsageContext.LLM_CLASS.value == "LLM_CLASS"

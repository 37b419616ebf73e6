"""LLM and the launcher against a child process that only plays an engine: prompts, order, errors, and that everything ends."""

import asyncio
import gc
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_engine
import numpy as np
import psutil
import pytest
import toy_tokenizers
from serving import until

from quire.frontend import launcher
from quire.frontend.client.llm import LLM
from quire.frontend.client.own_engine import engine_config
from quire.frontend.client.prompt import TextPrompt, TokensPrompt
from quire.frontend.client.stream import EngineDown, InvalidRequest, TooLong
from quire.frontend.launcher import EngineStartError, engine_configs, launch_core
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.config import EngineConfig
from quire.ipc.process.children import prespawn
from quire.ipc.sampling import SamplingParams

TOKENIZER = Tokenizer.from_files(toy_tokenizers.files())
THE, CAT = (TOKENIZER.encode(t)[0] for t in (" the", " cat"))
SUPPORT = str(Path(fake_engine.__file__).parent)
NEVER = [7]  # a prompt that is not answered


class FakeLLM(LLM):
    engine_module = "fake_engine"


@pytest.fixture(scope="module")
def python_path() -> Iterator[None]:
    """Children find the fake engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", SUPPORT, prepend=os.pathsep)
        yield


@pytest.fixture(scope="module")
def llm(python_path: None) -> Iterator[LLM]:
    with FakeLLM() as llm:
        yield llm


def texts(outputs: list[Any]) -> list[str]:
    return [o.outputs[0].text for o in outputs]


# ------------------------------------------------------------------------------------------------------------- prompts
@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        (" the cat", [" the cat the"]),
        ([THE, CAT], [" the cat the"]),
        (np.array([THE, CAT]), [" the cat the"]),
        ({"prompt": " cat"}, [" cat cat cat"]),
        ([" the", " cat"], [" the the the", " cat cat cat"]),
        ([[THE], [CAT]], [" the the the", " cat cat cat"]),
        ([{"prompt_token_ids": [THE]}, " cat", np.array([CAT, THE])], [" the the the", " cat cat cat", " cat the cat"]),
        ([TokensPrompt(prompt_token_ids=[THE]), TextPrompt(prompt=" cat")], [" the the the", " cat cat cat"]),
        ({"prompt": " cat", "cache_salt": None, "multi_modal_data": None}, [" cat cat cat"]),
        ([], []),
    ],
)
def test_prompts_come_alone_or_in_lists_in_every_shape(llm: LLM, prompts: Any, expected: list[str]) -> None:
    assert texts(llm.generate(prompts, SamplingParams(max_tokens=3))) == expected


def test_outputs_are_in_the_order_of_the_prompts_each_with_its_own_params(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=1 + i % 7, n=1 + i % 2) for i in range(200)]
    outputs = llm.generate([[THE, CAT][i % 2 :] for i in range(200)], params, priority=list(range(200)))
    for i, (output, p) in enumerate(zip(outputs, params, strict=True)):
        assert output.request_id == str(i) and output.finished and len(output.outputs) == p.n
        assert [len(o.token_ids) for o in output.outputs] == [p.max_tokens] * p.n
        assert output.prompt_token_ids == [THE, CAT][i % 2 :]


def test_default_params_are_the_models(llm: LLM) -> None:
    assert llm.get_default_sampling_params() == SamplingParams()
    assert len(llm.generate(" the")[0].outputs[0].token_ids) == 16


def test_chats_are_rendered_one_or_many(llm: LLM) -> None:
    one = [{"role": "user", "content": "the"}]
    (output,) = llm.chat(one, SamplingParams(max_tokens=1))
    assert output.prompt == "<|im_start|>user\nthe<|im_end|>\n<|im_start|>assistant\n"
    assert output.prompt_token_ids == llm.get_tokenizer().encode(output.prompt, add_special_tokens=False)
    two = llm.chat([one, one], SamplingParams(max_tokens=1), chat_template="{{ messages[0].content }}{{ tools | length }}",
                   tools=[{"type": "function"}])  # fmt: skip
    assert [o.prompt for o in two] == ["the1", "the1"]
    parts = [{"role": "user", "content": [{"type": "text", "text": "the"}]}]
    for form, shown in (("auto", "the"), ("string", "the"), ("openai", "[{'type': 'text', 'text': 'the'}]")):
        (output,) = llm.chat(parts, SamplingParams(max_tokens=1), chat_template_content_format=form)  # type: ignore[arg-type]
        assert shown in output.prompt
    with pytest.raises(ValueError, match="auto, string or openai"):
        llm.chat(parts, chat_template_content_format="parts")  # type: ignore[arg-type]
    assert llm.chat([]) == []
    for wrong in (one[0], None, "hi"):
        with pytest.raises(ValueError, match="list of messages"):
            llm.chat(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be a list"):
        llm.chat([None])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("prompts", "params", "error", "match"),
    [
        ([[THE], []], None, InvalidRequest, "prompt 1: .*empty"),
        ([NEVER, [THE] * 64], None, TooLong, "prompt 1: .*64 tokens"),
        ([[THE]], SamplingParams(logit_bias={10_000: 1.0}), ValueError, "vocabulary"),
        ([[THE]], [SamplingParams()] * 2, ValueError, "1 prompts and 2"),
        ([[THE]], {"max_tokens": 3}, ValueError, "must be SamplingParams or a list of them, got dict"),
        ([[THE]], 3, ValueError, "must be SamplingParams or a list of them, got int"),
        ([[THE]], [None], ValueError, "must be SamplingParams.*, got NoneType"),
        (None, None, ValueError, "needs prompts: a text, a list of token ids"),
        ({" the"}, None, ValueError, "a prompt or a list of prompts, got set"),
        ({"text": " the"}, None, InvalidRequest, "not supported: text"),
        ([" the", {"prompt": " the", "multi_modal_uuids": {}}], None, InvalidRequest, "not supported: multi_modal_uuids"),
        ({"prompt": " the", "cache_salt": 5}, None, ValueError, "cache_salt must be a string, got int"),
        ({"cache_salt": "x"}, None, ValueError, "a prompt is a text"),
        ([" the", None], None, ValueError, "a prompt is a text"),
        ({"prompt": None}, None, ValueError, "a prompt is a text"),
        ([b"the"], None, ValueError, "a prompt is a text"),
    ],
)
def test_what_cannot_run_is_said_and_nothing_runs(llm: LLM, prompts: Any, params: Any, error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        llm.generate(prompts, params)
    assert llm._client.num_requests == 0


def test_what_vllms_calls_have_and_these_have_not_is_said(llm: LLM) -> None:
    none = {"lora_request": None, "tokenization_kwargs": None, "mm_processor_kwargs": None}
    params, chat = SamplingParams(max_tokens=1), [{"role": "user", "content": "the"}]
    assert texts(llm.generate(" the", params, **none)) == [" the"]  # type: ignore[arg-type]
    assert len(llm.chat(chat, params, False, None, mm_processor_kwargs=None)) == 1
    for call in (lambda **more: llm.generate(" the", params, **more), lambda **more: llm.chat(chat, params, **more)):
        with pytest.raises(ValueError, match="tokenization_kwargs is not supported: give token ids"):
            call(tokenization_kwargs={"truncation": True})
        with pytest.raises(ValueError, match="lora_request must be a LoRARequest"):
            call(lora_request=object())
        with pytest.raises(ValueError, match="has no option 'lora'; there are sampling_params"):
            call(lora=None)
    with pytest.raises(ValueError, match="this model does not make vectors or scores; it can generate"):
        llm.embed(" the")
    with pytest.raises(NotImplementedError, match="reward is not here"):
        llm.reward(" the")  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="LLM has no 'generat'; did you mean generate"):
        llm.generat(" the")  # type: ignore[attr-defined]


def test_it_works_inside_a_running_loop_and_from_several_threads(llm: LLM) -> None:
    async def notebook() -> list[str]:
        return texts(llm.generate(" the", SamplingParams(max_tokens=2)))

    assert asyncio.run(notebook()) == [" the the"]
    results: list[list[str]] = []
    threads = [
        threading.Thread(target=lambda: results.append(texts(llm.generate([" cat"] * 20, SamplingParams(max_tokens=2)))))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[" cat cat"] * 20] * 3


def test_an_interrupt_aborts_the_requests_and_the_llm_goes_on(llm: LLM) -> None:
    main = threading.main_thread()

    def interrupt() -> None:
        until(lambda: llm._client.num_requests == 2)
        signal.pthread_kill(main.ident, signal.SIGINT)  # type: ignore[arg-type]

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([NEVER, NEVER], SamplingParams())
    thread.join()
    assert llm._client.num_requests == 0
    assert texts(llm.generate(" the", SamplingParams(max_tokens=1))) == [" the"]


def test_a_bar_appears_for_long_batches_only(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate([" the"] * 3, SamplingParams(max_tokens=1))
    assert capsys.readouterr().err == ""


def test_a_bar_appears_before_any_prompt_has_ended(
    llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.frontend.client.progress_bar._BAR_DELAY_S", 0.01)
    monkeypatch.setattr("quire.frontend.client.progress_bar._BAR_REFRESH_S", 0.02)
    shown: list[str] = []

    def interrupt() -> None:
        def seen() -> bool:
            shown.append(capsys.readouterr().err)
            return re.search(r"0/2 .*input: 0 tok/s, output: 0 tok/s", "".join(shown)) is not None

        until(seen)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([NEVER, NEVER], SamplingParams())
    thread.join()


# ------------------------------------------------------------------------------------------------------------- options
def test_an_unknown_option_names_those_like_it() -> None:
    with pytest.raises(ValueError, match="'max_model_length'; did you mean max_model_len"):
        LLM(max_model_length=5)
    for name in ("zzz", "memory_quota"):
        with pytest.raises(ValueError, match="there are model, revision") as error:
            LLM(**{name: 5})
        assert "max_num_seqs" in str(error.value) and "curve" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_model_len": 1}, "^max_model_len must be at least 2$"),
        ({"enable_lora": True, "max_loras": 0}, "^max_loras must be between 1 and 1024$"),
        ({"tensor_parallel_size": 0}, "^tensor_parallel_size must be between 1 and 64$"),
        ({"collective_timeout_s": float("inf")}, "^collective_timeout_s must be between 0.1 and 86400$"),
        ({"emulate_world_size": 4}, "^emulate_world_size runs one rank alone, .* it needs load_format dummy, and"),
        ({"data_parallel_size": 0}, "^data_parallel_size must be between 1 and 64$"),
        ({"data_parallel_size": 2, "listen": "ipc:///x"}, "one engine's address"),
        ({"device": "tpu"}, "^device: invalid enum value 'tpu'; there are auto, cuda, cpu$"),
        ({"kv_cache_dtype": "int8"}, "^kv_cache_dtype: invalid enum value 'int8'; there are auto, fp8, fp8_e4m3, fp8_e5m2$"),
        ({"max_num_seqs": "many"}, "^max_num_seqs: expected int or None, got str$"),
    ],
)
def test_a_bad_option_is_a_value_error(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        LLM(**options)


def test_options_become_the_engines_configuration() -> None:
    config = engine_config(Path("/models/x"), {"served_model_name": "x", "max_model_len": 9})
    assert config == EngineConfig(model="/models/x", served_model_name=["x"], max_model_len=9, disable_log_stats=True)


# ---------------------------------------------------------------------------------------------------------- start and end
@pytest.mark.parametrize(
    ("model", "match"),
    [("cannot-start", "^the model is made of cheese: --max-model-len$"), ("dies", "exit code 3"), ("mute", "not ready")],
)
def test_an_engine_that_cannot_start_says_why_and_leaves_nothing(python_path: None, model: str, match: str) -> None:
    before = psutil.Process().children()
    with pytest.raises(EngineStartError, match=match):
        launch_core(EngineConfig(model=model), timeout_s=0.5 if model == "mute" else None, module="fake_engine")
    assert psutil.Process().children() == before


def test_an_engine_that_is_stopped_while_it_starts_is_given_up(python_path: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_POLL_S", 0.05)
    before, child = psutil.Process().children(), prespawn("fake_engine")
    child.send_signal(signal.SIGSTOP)
    config = EngineConfig(model="mute", collective_timeout_s=0.2)
    with pytest.raises(EngineStartError, match=r"^the engine's process was stopped by a signal 0\.\d+ s ago, while it starte"):
        launch_core(config, prespawned=child)
    assert psutil.Process().children() == before


def test_several_engines_are_one_llm(python_path: None) -> None:
    before = psutil.Process().children()
    with FakeLLM(data_parallel_size=3) as llm:
        assert len({core.child.pid for core in llm._own.background._cores}) == 3
        outputs = llm.generate([" the", " cat"] * 10, SamplingParams(max_tokens=2), use_tqdm=False)
        assert texts(outputs) == [" the the", " cat cat"] * 10
        assert llm.get_tokenizer().encode(" the")
    assert psutil.Process().children() == before


def test_of_several_engines_all_start_or_none(python_path: None) -> None:
    before = psutil.Process().children()
    with pytest.raises(EngineStartError, match=r"^engine \d: the model is made of cheese: max_model_len$"):
        FakeLLM("cannot-start", data_parallel_size=3)
    assert psutil.Process().children() == before


def test_engines_have_gpus_of_their_own() -> None:
    configs = engine_configs(EngineConfig(data_parallel_size=3, device_index=2))
    assert [config.device_index for config in configs] == [2, 3, 4]


def test_an_llm_that_cannot_start_names_arguments_not_flags(python_path: None) -> None:
    with pytest.raises(EngineStartError, match=r"^the model is made of cheese: max_model_len$"):
        FakeLLM("cannot-start")


@pytest.mark.parametrize("how", ["shutdown", "with", "del", "in the loop's thread"])
def test_everything_ends_with_the_object(python_path: None, how: str) -> None:
    threads = set(threading.enumerate())
    llm = FakeLLM()
    child, loop = llm._own.background._cores[0].child, llm._own.background._loop
    if how == "shutdown":
        llm.shutdown()
        llm.shutdown()
        with pytest.raises(EngineDown, match="shut down"):
            llm.generate(" the")
    elif how == "with":
        with llm:
            pass
    elif how == "in the loop's thread":
        loop.call_soon_threadsafe(llm._own.shutdown)
        until(lambda: not {t for t in threading.enumerate() if t.name.startswith("quire-llm")} - threads)
    del llm
    gc.collect()
    assert child.poll() is not None
    assert loop.is_closed()
    assert not {t for t in threading.enumerate() if t.name.startswith("quire-llm")} - threads


def test_requests_fail_when_the_engine_dies(python_path: None) -> None:
    with FakeLLM() as llm:
        child = llm._own.background._cores[0].child

        def kill() -> None:
            until(lambda: llm._client.num_requests == 1)
            child.proc.kill()

        thread = threading.Thread(target=kill)
        thread.start()
        with pytest.raises(EngineDown):
            llm.generate(NEVER, SamplingParams())
        thread.join()


SCRIPT = """
from test_llm_api import FakeLLM
from quire.frontend.client.llm import SamplingParams
llm = FakeLLM()
llm.generate(" the", SamplingParams(max_tokens=1))
print(llm._own.background._cores[0].child.pid, flush=True)
"""


def test_a_script_that_just_ends_takes_its_engine_with_it() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([SUPPORT, str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and done.stderr == ""
    assert not psutil.pid_exists(int(done.stdout))

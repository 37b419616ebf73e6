"""LLMEngine, AsyncLLM and their arguments, as vLLM's users know them: over the real engine and the bundled model."""

import argparse
import asyncio
import copy
import dataclasses
import logging
import operator
import sys
from collections.abc import Iterator

import pytest

import quire
from quire import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    AsyncLLMEngine,
    BeamSearchParams,
    EngineArgs,
    LLMEngine,
    RequestOutputKind,
    SamplingParams,
    TokensPrompt,
)
from quire.frontend.client.outputs import CompletionOutput, RequestOutput
from quire.frontend.client.request_outputs import merged
from quire.frontend.client.stream import EngineDown, TooLong
from quire.utils.argparse_utils import FlexibleArgumentParser

SMALL = {"device": "cpu", "dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "cpu_kv_cache_gib": 0.05}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=240, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM.from_engine_args(EngineArgs(**SMALL)) as llm:
        yield llm


@pytest.fixture(scope="module")
def engine(llm: LLM) -> LLMEngine:
    return llm.llm_engine


@pytest.fixture(scope="module")
def async_llm() -> Iterator[AsyncLLM]:
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**SMALL))
    yield engine
    engine.shutdown()


# ------------------------------------------------------------------------------------------------------------- arguments
def test_arguments_have_vllms_names_and_defaults(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    caplog.set_level(logging.INFO, "quire")
    args = EngineArgs(model="m", dtype="half", swap_space=4, trust_remote_code=True, quantization=None, seed=3)
    assert (args.model, args.dtype, args.seed, args.max_num_seqs) == ("m", "float16", 3, None)
    assert args.create_engine_config().model_config.dtype == "float16"
    assert [r.getMessage() for r in caplog.records if "not needed" in r.getMessage()] == [
        "not needed here, and without effect: swap_space, trust_remote_code"
    ]
    args.max_num_seqs = 7
    assert args.create_engine_config().scheduler_config.max_num_seqs == dataclasses.asdict(args)["max_num_seqs"] == 7
    assert EngineArgs(**dataclasses.asdict(args)) == args
    assert (args.swap_space, args.trust_remote_code, args.task) == (4, True, None)
    with pytest.raises(AttributeError, match="nowhere"):
        args.nowhere = 5


@pytest.mark.parametrize("kind", [EngineArgs, AsyncEngineArgs])
def test_wrong_arguments_are_named(kind):
    with pytest.raises(ValueError, match=rf"{kind.__name__} has no option 'max_model_length'; did you mean max_model_len"):
        kind(max_model_length=5)
    assert kind(kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=[0, "sliding_window"]).kv_cache_dtype_skip_layers[0] == "0"
    assert kind(quantization="gptq_marlin").quantization == "gptq"
    with pytest.raises(ValueError, match=r"quantization must be one of fp8, .*, not 'torchao'"):
        kind(quantization="torchao")
    with pytest.raises(ValueError, match="max_model_len"):
        kind(max_model_len="long")


def test_arguments_without_a_field_here_mean_what_their_flags_do():
    options = {"attention_backend": "FLASHINFER", "max_num_partial_prefills": 1, "mm_processor_kwargs": None}
    grammars = {"structured_outputs_config": {"backend": "xgrammar"}}
    assert EngineArgs(**options, **grammars, enable_lora=False, allowed_local_media_path="") == EngineArgs()
    assert EngineArgs(limit_mm_per_prompt={"image": 1, "video": 0}) == EngineArgs()
    with pytest.raises(ValueError, match=r"worker_cls='mine' is not supported: no code of others"):
        EngineArgs(worker_cls="mine")
    with pytest.raises(ValueError, match=r"enable_sleep_mode=True is not supported"):
        EngineArgs(enable_sleep_mode=True)
    assert EngineArgs(profiler_config={"profiler": "torch", "torch_profiler_dir": "traces"}).profile_dir == "traces"
    with pytest.raises(ValueError, match=r"profiler_config may say .* profile_dir"):
        EngineArgs(profiler_config={"profiler": "cuda"})


def test_arguments_from_a_command_line():
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    parser.add_argument("words", nargs="*")
    given = parser.parse_args(["--model", "m", "--max-num-seqs", "3", "of", "mine"])
    args = EngineArgs.from_cli_args(given)
    assert (args.model, args.max_num_seqs, given.words) == ("m", 3, ["of", "mine"])
    parser.set_defaults(model="another")
    assert EngineArgs.from_cli_args(parser.parse_args([])).model == "another"
    assert vars(AsyncEngineArgs.add_cli_args(argparse.ArgumentParser(), async_args_only=True).parse_args([])) == {}
    group = (parser := FlexibleArgumentParser()).add_argument_group("the engine's")
    EngineArgs.add_cli_args(group)
    group.set_defaults(model="a third")
    assert EngineArgs.from_cli_args(parser.parse_args([])).model == "a third"


def test_the_parser_of_vllms_examples(capsys, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    caplog.set_level(logging.INFO, "quire")
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="mine.py"))
    parser.add_argument("--swap-space", type=int)  # the script's own, whatever vLLM's is
    words = ["--max_num_seqs", "3", "--trust-remote-code", "--swap_space=5", "--hf-overrides.a", "1", "--dtype", "half"]
    given = vars(parser.parse_args(words))
    assert given.pop("swap_space") == 5
    args = EngineArgs(**given)
    assert (args.max_num_seqs, args.dtype, args.hf_overrides) == (3, "float16", {"a": 1})
    (note,) = [r.getMessage() for r in caplog.records]
    assert note.startswith("not needed here, and without effect: --trust-remote-code (")
    monkeypatch.setattr(sys, "argv", ["mine.py", "--max-num-seqs", "4"])
    assert parser.parse_args().max_num_seqs == 4
    for wrong in ("--enable-mm-embeds", "--max-num-sequences"):
        with pytest.raises(SystemExit):
            parser.parse_args([wrong])
        assert f"mine.py: {'unrecognized arguments: ' * (wrong != '--enable-mm-embeds')}{wrong}" in capsys.readouterr().err


def test_commands_of_a_script_read_their_own_flags():
    parser = FlexibleArgumentParser()
    command = parser.add_subparsers().add_parser("run")
    command.add_argument("--enable-mm-embeds", action="store_true")
    assert parser.parse_args(["run", "--enable_mm_embeds"]).enable_mm_embeds


def test_names_of_the_package():
    assert AsyncLLMEngine is AsyncLLM
    assert all(getattr(quire, name) is not None for name in quire.__all__)


# ------------------------------------------------------------------------------------------------------------- LLMEngine
def until_done(engine: LLMEngine) -> dict:
    """The last output of each request."""
    last: dict = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            before = last.get(output.request_id)
            assert before is None or not before.finished
            assert before is None or len(output.outputs[0].token_ids) > len(before.outputs[0].token_ids) or output.finished
            last[output.request_id] = output
    assert all(output.finished for output in last.values())
    return last


def test_requests_are_added_and_stepped_to_their_ends(llm, engine):
    prompts = {"a": "Once upon a time", "b": {"prompt": "The cat"}, "c": [5, 6, 7]}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, GREEDY)
    assert engine.get_num_unfinished_requests() == 3
    last = until_done(engine)
    want = llm.generate(list(prompts.values()), GREEDY)
    assert {n: o.outputs[0].token_ids for n, o in last.items()} == {
        n: o.outputs[0].token_ids for n, o in zip(prompts, want, strict=True)
    }
    assert last["a"].prompt == "Once upon a time" and last["c"].prompt is None
    assert engine.step() == [] and not engine.has_unfinished_requests()


def test_outputs_hold_what_their_kind_says(engine):
    texts, ids, counts = {}, {}, {}
    for kind in RequestOutputKind:
        params = SamplingParams(n=2, seed=1, max_tokens=9, ignore_eos=True, logprobs=0, output_kind=kind)
        engine.add_request(kind.name, "Once upon a time", params)
        params.max_tokens = 200  # of requests to come: this one has its own
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
        shown = outputs if kind is RequestOutputKind.DELTA else outputs[-1:]
        of = [[c for o in shown for c in o.outputs if c.index == i] for i in (0, 1)]
        texts[kind] = ["".join(c.text for c in each) for each in of]
        ids[kind] = [[t for c in each for t in c.token_ids] for each in of]
        counts[kind] = [sum(len(c.logprobs) for c in each) for each in of]
        assert len(outputs) == 1 or kind is not RequestOutputKind.FINAL_ONLY
        assert [each[-1].finish_reason for each in of] == ["length", "length"]
    assert all(each == texts[RequestOutputKind.FINAL_ONLY] for each in texts.values())
    assert all(each == ids[RequestOutputKind.FINAL_ONLY] for each in ids.values())
    assert all(each == [9, 9] for each in counts.values())


def test_changes_that_came_between_two_steps_are_one():
    params = SamplingParams(n=2, output_kind=RequestOutputKind.DELTA)

    def output(finished, *parts):
        return RequestOutput("0", "p", [1], None, [CompletionOutput(i, t, [len(t)]) for i, t in parts], finished)

    both = merged(merged(None, output(False, (1, "ab")), params), output(True, (0, "x"), (1, "cde")), params)
    assert [(c.index, c.text, c.token_ids) for c in both.outputs] == [(0, "x", [1]), (1, "abcde", [2, 3])]
    assert both.finished
    assert merged(both, output(True, (0, "y")), SamplingParams()).outputs[0].text == "y"


def test_a_prompts_salt_decides_with_whom_it_shares_its_prefix(llm, engine, async_llm):
    """Of every way to ask; the ids of two blocks and more."""
    ids = list(range(100, 140))
    asked = iter(range(100))

    def of_llm(prompt):
        (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
        return output.num_cached_tokens

    def of_llm_engine(prompt):
        name = str(next(asked))
        engine.add_request(name, prompt, GREEDY)
        return until_done(engine)[name].num_cached_tokens

    async def of_async_llm(prompt):
        return [output async for output in async_llm.generate(prompt, GREEDY, str(next(asked)))][-1].num_cached_tokens

    ways = {"llm": of_llm, "engine": of_llm_engine, "async": lambda prompt: asyncio.run(of_async_llm(prompt))}
    for name, ask in ways.items():
        mine, yours = (TokensPrompt(prompt_token_ids=ids, cache_salt=f"{whose} {name}") for whose in ("mine", "yours"))
        assert [ask(mine), ask(mine), ask(yours), ask(yours)] == [0, 32, 0, 32]
    before = llm.beam_search([TokensPrompt(prompt_token_ids=ids, cache_salt="beams")], BeamSearchParams(2, 2))
    assert of_llm(TokensPrompt(prompt_token_ids=ids, cache_salt="beams")) == 32 and len(before[0].sequences) == 2


def test_the_cache_of_an_engine_is_forgotten(engine):
    assert engine.reset_prefix_cache() is True and engine.reset_prefix_cache(False, reset_connector=True) is True
    with pytest.raises(ValueError, match="reset_running_requests is not supported: requests that run keep their blocks"):
        engine.reset_prefix_cache(reset_running_requests=True)


def test_an_aborted_request_is_heard_of_no_more(engine):
    for name in ("stays", "goes", "goes too"):
        engine.add_request(name, "The cat", LONG)
    engine.step()
    engine.abort_request("goes")
    engine.abort_request(["goes too", "never was"])
    assert engine.get_num_unfinished_requests() == 1
    last = until_done(engine)
    assert list(last) == ["stays"] and len(last["stays"].outputs[0].token_ids) == 240
    engine.add_request("goes", "The cat", GREEDY)  # its name is free again
    assert list(until_done(engine)) == ["goes"]


def test_what_cannot_run_is_said_when_it_is_added(engine):
    engine.add_request("a", "The cat", LONG)
    with pytest.raises(ValueError, match="'a' is in use"):
        engine.add_request("a", "The cat", GREEDY)
    with pytest.raises(TooLong):
        engine.add_request("b", [5] * 300, GREEDY)
    with pytest.raises(ValueError, match="allowed_token_ids"):
        engine.add_request("b", "x", SamplingParams(allowed_token_ids=[1 << 20]))
    with pytest.raises(ValueError, match="request_id"):
        engine.add_request(5, "x", GREEDY)
    with pytest.raises(ValueError, match="lora_request"):
        engine.add_request("b", "x", GREEDY, None, object())
    with pytest.raises(ValueError, match="trace_headers"):
        engine.add_request("b", "x", GREEDY, None, None, trace_headers={"traceparent": "x"}, tokenization_kwargs=None)
    engine.abort_request("a")
    assert not engine.has_unfinished_requests()


def test_an_error_of_the_engines_is_raised_by_a_step(engine):
    engine.add_request("fine", "The cat", GREEDY)
    engine.add_request("not", "The cat", GREEDY, priority=3)  # which needs another policy: the engine knows
    failed, finished = [], []
    while engine.has_unfinished_requests():
        try:
            finished += [o.request_id for o in engine.step() if o.finished]
        except ValueError as error:
            failed.append(str(error))
    assert finished == ["fine"] and len(failed) == 1 and "priority" in failed[0]


def test_the_engine_of_an_llm_is_the_same(llm, engine):
    assert isinstance(engine, LLMEngine) and llm.llm_engine is engine and llm.model_config == engine.model_config
    assert engine.get_tokenizer() is engine.tokenizer is llm.get_tokenizer()


def test_an_async_engine_has_transformers_tokenizer_too(async_llm, llm):
    assert asyncio.run(async_llm.get_tokenizer()).get_vocab() == llm.get_tokenizer().get_vocab()


def test_an_engine_says_what_it_is():
    with LLMEngine.from_engine_args(EngineArgs(**SMALL, seed=5), usage_context=None) as engine:
        config = engine.model_config
        assert (config.max_model_len, config.dtype, config.seed, config.quantization) == (256, "float32", 5, None)
        assert config.model == config.tokenizer == config.served_model_name != ""
        assert config.get_vocab_size() == config.vocab_size > 256
        assert engine.cache_config.block_size * engine.cache_config.num_gpu_blocks >= 256
        assert engine.vllm_config.model_config == config and engine.vllm_config.cache_config == engine.cache_config
        engine.add_request("0", "The cat", GREEDY)
        assert len(until_done(engine)["0"].outputs[0].token_ids) == 8
    with pytest.raises(EngineDown):
        _ = engine.model_config


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("model_executor", "LLMEngine.model_executor is not here: the engine is a process of its own"),
        ("sleep", "LLMEngine.sleep is not here: engines do not sleep"),
        ("output_processor", "LLMEngine.output_processor is not here: the engine is a process"),
        ("vllm_config.compilation_config", "VllmConfig.compilation_config is not here: nothing is compiled by torch"),
    ],
)
def test_what_an_engine_cannot_say_has_its_reason(engine, path, why):
    with pytest.raises(NotImplementedError, match=why):
        operator.attrgetter(path)(engine)()
    with pytest.raises(AttributeError, match=r"LLMEngine has no 'step_'; did you mean step\?$"):
        _ = engine.step_
    assert not hasattr(engine, "_missing") and copy.copy(engine.model_config) == engine.model_config


# -------------------------------------------------------------------------------------------------------------- AsyncLLM
def test_an_async_engine_says_what_it_is(async_llm):
    async def ask():
        return await async_llm.get_model_config()

    config = asyncio.run(ask())
    assert config.max_model_len == 256 and async_llm.model_config == config
    with pytest.raises(NotImplementedError, match=r"AsyncLLM.wake_up is not here: engines do not sleep"):
        async_llm.wake_up()
    with pytest.raises(NotImplementedError, match=r"AsyncLLM.pause_generation is not here: an engine does not pause"):
        async_llm.pause_generation()


def test_outputs_come_as_they_are_made(async_llm):
    async def one(name: str) -> list:
        return [output async for output in async_llm.generate("The cat", GREEDY, name)]

    async def main():
        several = await asyncio.gather(*map(one, "abc"))
        for name, outputs in zip("abc", several, strict=True):
            assert outputs[-1].finished and len(outputs[-1].outputs[0].token_ids) == 8
            assert {o.request_id for o in outputs} == {name}
            assert len(outputs[0].outputs[0].token_ids) <= 8
        assert (await async_llm.get_tokenizer()).encode("a")
        await async_llm.check_health()
        beams = await async_llm.beam_search("The cat", BeamSearchParams(2, 4))
        assert len(beams.sequences) == 2

    for _ in range(2):  # in a loop of its own each
        asyncio.run(main())
    assert async_llm.is_running and not async_llm.is_stopped


def test_an_abort_ends_its_iterator(async_llm):
    async def main():
        outputs = []
        async for output in async_llm.generate("The cat", LONG, "mine"):
            outputs.append(output)
            if len(outputs) == 1:
                with pytest.raises(ValueError, match="in use"):
                    await anext(async_llm.generate("The cat", GREEDY, "mine"))
                with pytest.raises(ValueError, match="data_parallel_rank is not supported"):
                    await anext(async_llm.generate("The cat", GREEDY, "other", data_parallel_rank=1, trace_headers=None))
                await async_llm.abort(["mine", "unknown"])
        assert outputs[-1].outputs[0].finish_reason == "abort"
        assert len(outputs[-1].outputs[0].token_ids) < 240
        assert [o async for o in async_llm.generate("The cat", GREEDY, "mine")][-1].finished

    asyncio.run(main())


def test_its_cache_is_forgotten_and_its_health_told(async_llm):
    async def ask() -> tuple[bool, bool]:
        return await async_llm.reset_prefix_cache(), async_llm.errored

    assert asyncio.run(ask()) == (True, False)


def test_after_its_end_it_says_so(async_llm):
    """The last one of those that share it."""

    async def main():
        problems = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
        async with async_llm as engine:
            stream = engine.generate("The cat", LONG, "mine")
            assert await anext(stream)
            await stream.aclose()
            engine.shutdown()
            engine.shutdown()
        assert engine.is_stopped and not problems
        engine.shutdown()
        with pytest.raises(EngineDown):
            await anext(engine.generate("The cat", GREEDY, "more"))

    asyncio.run(main())

"""The operator's own logits processors, in vLLM's interface, on the bundled shapes: what they see, change and may not break."""

import random

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from inline_engine import InlineEngine
from tiny_models import tiny_model

from quire.ipc.sampling import SamplingParams
from quire.ipc.step.custom_processors import CustomProcessorsRecord, decode_records, encode_record
from quire.ipc.step.sections import NO_TOKEN
from quire.workers.logits_processors.batch import CustomProcessors, ProcessedSequence
from quire.workers.logits_processors.interface import (
    AdapterLogitsProcessor,
    LogitsProcessor,
    MoveDirectionality,
    process_dict_updates,
)


class OnlyToken(LogitsProcessor):
    """extra_args {"only": id}: nothing else is sampled; {"break": True}: it raises."""

    def __init__(self, vllm_config, device, is_pin_memory):
        self.only: dict[int, int] = {}

    @classmethod
    def validate_params(cls, sampling_params):
        if "only" in (sampling_params.extra_args or {}) and not isinstance(sampling_params.extra_args["only"], int):
            raise ValueError("only must be a token id")

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        process_dict_updates(self.only, batch_update, self.new_state)

    def new_state(self, params, prompt_ids, output_ids):
        args = params.extra_args or {}
        if args.get("break") == "update":
            raise KeyError("no such thing")
        return args.get("only")

    def apply(self, logits):
        rows, columns = list(self.only), list(self.only.values())
        kept = logits[rows, columns].clone()
        logits[rows] = float("-inf")
        logits[rows, columns] = kept
        return logits


class Counting(AdapterLogitsProcessor):
    """The next token is the number of output ids so far, plus the last of them: each id must have arrived."""

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        if not (params.extra_args or {}).get("count"):
            return None

        def process(prompt_ids, output_ids, logits):
            forced = torch.full_like(logits, -1e9)
            forced[(len(output_ids) + (output_ids[-1] if output_ids else prompt_ids[-1])) % 50] = 0.0
            return forced

        return process


def counted(prompt, n):
    out = []
    for i in range(n):
        out.append((i + (out[-1] if out else prompt[-1])) % 50)
    return out


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


def params(**more):
    return SamplingParams(temperature=0.0, ignore_eos=True, **{"max_tokens": 6, **more})


def test_rows_with_arguments_are_changed_and_others_are_as_without(model):
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [1, 2, 3]]
    plain = InlineEngine(model).generate(prompts, params())
    engine = InlineEngine(model, processors=[OnlyToken])
    asked = [params(), params(extra_args={"only": 17}), params(), params(extra_args={"other": 1})]
    assert engine.generate(prompts, asked) == [plain[0], [17] * 6, plain[2], plain[3]]


@pytest.mark.parametrize("depth", [1, 2])
def test_output_ids_are_always_complete(model, depth):
    """With chunks, requests that come and go, preemption and turns."""
    engine = InlineEngine(
        model, processors=[Counting, OnlyToken], budget=8, num_blocks=11, block_size=4, depth=depth, look_ahead=False
    )
    rng = random.Random(1)
    prompts = [[rng.randrange(60) for _ in range(rng.randrange(1, 20))] for _ in range(12)]
    asked = [params(max_tokens=rng.randrange(1, 12), extra_args={"count": True}) for _ in prompts]
    asked[3] = params(extra_args={"only": 9})
    outputs = engine.generate(prompts, asked)
    for prompt, p, output in zip(prompts, asked, outputs, strict=True):
        assert output == ([9] * 6 if p is asked[3] else counted(prompt, p.max_tokens))
    assert engine.scheduler.counters.preemptions > 0


def test_logprobs_are_the_models_own(model):
    plain = InlineEngine(model)
    plain.generate([[1, 2, 3]], params(logprobs=0, max_tokens=1, allowed_token_ids=[17]))
    changed = InlineEngine(model, processors=[OnlyToken])
    changed.generate([[1, 2, 3]], params(logprobs=0, max_tokens=1, extra_args={"only": 17}))
    assert torch.equal(plain.runner.device.results[1], changed.runner.device.results[1])


def test_a_request_that_breaks_a_processor_breaks_nothing_else(model):
    engine = InlineEngine(model, processors=[OnlyToken])
    failed = []
    results = engine._results

    def without_failed(step):
        samples = results(step)
        failed.extend(int(step.slots[row]) for row in step.processed_rows if samples.tokens[row] == NO_TOKEN)
        return samples._replace(tokens=np.where(samples.tokens == NO_TOKEN, 0, samples.tokens))

    engine._results = without_failed
    bad = [{"break": "update"}, {"only": 10**6}, {"only": "x"}]
    for args in bad:
        failed.clear()
        prompts = [[1, 2], [3, 4], [5]]
        asked = [params(extra_args={"only": 20}), params(extra_args=args, max_tokens=1), params(extra_args={"only": 21})]
        good, _, other = engine.generate(prompts, asked)
        assert len(failed) == 1 and good == [20] * 6 and other == [21] * 6


SEEN: list[torch.Tensor] = []


class Invariant(LogitsProcessor):
    """Keeps what has at least half of the best one's probability, and all of it if all requests are to be seen."""

    all_requests = True

    def __init__(self, vllm_config, device, is_pin_memory):
        pass

    def is_argmax_invariant(self):
        return True

    def update_state(self, batch_update):
        pass

    def apply(self, logits):
        SEEN.append(logits.clone())
        p = logits.softmax(-1)
        return logits.masked_fill(p < 0.5 * p.max(-1, keepdim=True).values, float("-inf"))


def test_all_requests_and_a_temperature_before_what_keeps_the_best(model):
    SEEN.clear()
    engine = InlineEngine(model, processors=[Invariant])
    hot = params(max_tokens=1).__class__(temperature=2.0, seed=1, max_tokens=1)
    engine.generate([[1, 2, 3], [1, 2, 3]], [params(max_tokens=1), hot])
    cold, warm = SEEN[0]
    assert torch.allclose(cold / 2, warm, atol=1e-5) and SEEN[0].dtype is torch.float32


def test_what_a_class_says_of_itself():
    def info(*kinds):
        return CustomProcessors(kinds, None, torch.device("cpu")).info

    assert info(Counting).all_requests is info(Counting).checks_params is False
    assert info(OnlyToken).checks_params and info(Counting, Invariant).all_requests
    processors = CustomProcessors([OnlyToken], None, torch.device("cpu"))
    assert processors.check(SamplingParams(extra_args={"only": "x"})) == "only must be a token id"
    assert processors.check(SamplingParams(extra_args={"only": 3})) == ""


# ------------------------------------------------------------------------------------------------- the batch and its words
@pytest.mark.parametrize("seed", range(20))
def test_a_batch_update_brings_any_batch_to_the_next(seed):
    """Both readers of it end with the right request at each index: in the documented order, and vLLM's own helper's."""
    rng = random.Random(seed)
    processors = CustomProcessors([], None, torch.device("cpu"))
    everybody = [ProcessedSequence(SamplingParams(), [], [i]) for i in range(12)]
    documented: dict[int, int] = {}
    adds_first: dict[int, int] = {}
    for _ in range(40):
        present = rng.sample(everybody, rng.randrange(0, 9))
        update = processors._move_batch(present)
        assert sorted(map(id, processors._batch)) == sorted(map(id, present))
        if update is not None:
            assert update.batch_size == len(present)
            assert not {i for i, *_ in update.added} & set(update.removed)
            replay(documented, update)
            for index, _, _, output in update.added:
                adds_first[index] = output[0]
            replay(adds_first, update.__class__(update.batch_size, update.removed, [], update.moved))
        expected = {i: member.output_ids[0] for i, member in enumerate(processors._batch)}
        assert documented == adds_first == expected


def replay(entries, update):
    process_dict_updates(entries, update, lambda params, prompt, output: output[0])


def test_a_swap_is_understood():
    entries = {0: "a", 1: "b"}
    update = (
        CustomProcessors([], None, torch.device("cpu"))._whole_batch([]).__class__(2, [], [], [(0, 1, MoveDirectionality.SWAP)])
    )
    assert process_dict_updates(entries, update, lambda *_: None) and entries == {0: "b", 1: "a"}


def test_records_come_back_as_they_went():
    ids = np.arange(5, dtype=np.int32)
    records = [
        CustomProcessorsRecord(3, ids, ids[:2], SamplingParams(extra_args={"a": [1, "x", None]}, stop=["y"])),
        CustomProcessorsRecord(0, ids[:1], ids[:0], SamplingParams()),
    ]
    back = list(decode_records(np.concatenate([encode_record(r) for r in records])))
    for record, again in zip(records, back, strict=True):
        assert again.slot == record.slot and again.params == record.params
        assert np.array_equal(again.prompt_ids, record.prompt_ids) and np.array_equal(again.output_ids, record.output_ids)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [True, False])
def test_on_a_gpu_with_captured_forwards_and_half_precision(graphs):
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [1, 2, 3]]
    engine = InlineEngine(
        tiny_model("gpu-llama"), device="cuda", dtype=torch.bfloat16, graphs=graphs, processors=[OnlyToken, Counting]
    )
    asked = [params(), params(extra_args={"only": 17}), params(extra_args={"count": True}), params()]
    first, only, count, second = engine.generate(prompts, asked)
    assert first == second and only == [17] * 6 and count == counted(prompts[2], 6)
    assert engine.generate(prompts[:1], params()) == [first]

"""Rows with grammars have drafts, and rows beside them too: the answers are those without drafts, in float32, token by token.

All requests of ASKED run side by side, with drafters that are right, wrong, by chance, or always at the model's own end.
"""

import functools
import json

import numpy as np
import pytest
from core_with_model import CoreWithModel, Output
from drafters import DrafterOfTexts, drafting

from quire.enginecore.grammar import deferred, mask_threads, masks
from quire.enginecore.grammar.without_token import TOO_LATE
from quire.ipc.messages.frontend import RequestError
from quire.ipc.sampling import SamplingParams
from quire.ipc.speculative_config import SpeculativeConfig
from quire.ipc.structured_outputs import StructuredOutputs

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PERSON = StructuredOutputs("json", json.dumps(SCHEMA))
YES_NO = StructuredOutputs("choice", '["yes", "no", "yes and no"]')
RECORDS = StructuredOutputs("regex", r"(one two three ){8}")
CALL = StructuredOutputs(
    "structural_tag",
    json.dumps(
        {
            "structures": [{"begin": "<call>", "schema": SCHEMA, "end": "</call>"}],
            "triggers": ["<call>"],
        }
    ),
)
RANDOM = {"temperature": 1.0, "seed": 5}
END = [50]  # of reasoning: any token will do
THINKING = {"reasoning_end_token_ids": END, "thinking_token_budget": 6}
BEGUN = {"reasoning_end_token_ids": END, "reasoning_start_token_ids": [49], "thinking_token_budget": 3}
ASKED = {
    "greedy": {},
    "seeded": {**RANDOM, "top_p": 0.9, "top_k": 50},
    "penalties": {**RANDOM, "presence_penalty": 1.0, "frequency_penalty": 1.0, "repetition_penalty": 1.3},
    "min_tokens": {"min_tokens": 12},
    "bad words": {**RANDOM, "bad_words_token_ids": [[5], [900, 901], [40, 41]], "seed": 1},
    "bias": {"logit_bias": {40: 100.0, 41: -100.0}},
    "ignore_eos": {"ignore_eos": True},
    "n": {**RANDOM, "n": 3},
    "length": {"max_tokens": 9},
    "choice": {"structured_outputs": YES_NO, **RANDOM},
    "choice at its length": {"structured_outputs": YES_NO, "max_tokens": 1},
    "choice goes on": {"structured_outputs": YES_NO, "min_tokens": 3, "ignore_eos": True},
    "regex": {"structured_outputs": RECORDS},
    "regex under ignore_eos": {"structured_outputs": RECORDS, "ignore_eos": True},
    "tag": {"structured_outputs": CALL, "logit_bias": {28: 6.0}, "max_tokens": 40},
    "tag, seeded": {"structured_outputs": CALL, **RANDOM, "max_tokens": 30},
    "stop ids": {"stop_token_ids": [*range(4, 2816, 12)], "temperature": 0.9, "seed": 3},
    "allowed": {"structured_outputs": YES_NO, "allowed_token_ids": [*range(4, 2000)]},
    "nothing left": {
        "structured_outputs": YES_NO,
        "bad_words": ["yes", " and"],
        "bad_words_token_ids": [[i] for i in range(90)],
    },
    "thinking": THINKING,
    "thinking, seeded": {**THINKING, **RANDOM, "thinking_token_budget": 15},
    "thinking that ends": {**THINKING, "logit_bias": {50: 5.0}, "thinking_token_budget": 60, "temperature": 1.0, "seed": 2},
    "thinking that begins": {**BEGUN, "logit_bias": {49: 100.0, 50: -100.0}},
    "thinking that does not": BEGUN,
    "thinking at once over": {**BEGUN, "logit_bias": {49: 8.0, 50: 8.0}, "temperature": 1.0, "seed": 4},
    "a budget alone": {"structured_outputs": None, **THINKING, "max_tokens": 40, "ignore_eos": True},
    "a long end": {"structured_outputs": None, "reasoning_end_token_ids": [50, 60, 50, 70], "thinking_token_budget": 20},
    "free": {"structured_outputs": None, "max_tokens": 50, "ignore_eos": True},
    "free, seeded": {"structured_outputs": None, **RANDOM, "max_tokens": 50},
}
PROMPTS = ["Who is it?", "Tell me the name", "Story", "one two three one two three one two"]


def params(**fields) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 60, "temperature": 0.0, "structured_outputs": PERSON, **fields})


REQUESTS = [(PROMPTS[i % len(PROMPTS)], params(**fields)) for i, fields in enumerate(ASKED.values())]


def said(results: list[list[Output] | RequestError]) -> dict[str, object]:
    """What a client is told of each request."""
    told: dict[str, object] = {}
    for name, result in zip(ASKED, results, strict=True):
        if isinstance(result, RequestError):
            told[name] = result.message
        else:
            told[name] = [(o.ids, o.finished and (o.finished.reason, o.finished.stop_token_id)) for o in result]
    return told


@functools.cache
def without_drafts() -> tuple[dict[str, object], list[list[int]]]:
    """Answers, and texts: each prompt with its answer."""
    engine = CoreWithModel()
    try:
        results = engine.run_all(REQUESTS)
        texts = [
            engine.encode(prompt) + output.ids
            for (prompt, _), result in zip(REQUESTS, results, strict=True)
            for output in (result if isinstance(result, list) else [])
        ]
        return said(results), texts
    finally:
        engine.close()


class Drafting(CoreWithModel):
    def __init__(self, drafter: str, window: int, **sizes) -> None:
        config = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=window - 1,
            prompt_lookup_min=1,
            prompt_lookup_max=3,
            enable_adaptive_verification=False,
        )
        super().__init__(speculation=config, **sizes)
        if drafter != "ngram":
            runner = self.engine.runner
            of = drafting(drafter, without_drafts()[1], self.eos[-1], runner.ctx.config.vocab_size)
            runner.device.drafter = DrafterOfTexts(runner.ctx.cache, 0, of)

    @property
    def accepted(self) -> int:
        return sum(self.core.scheduler.counters.windows.so_far().accepted_by_place)


PREEMPTION = {"num_blocks": 34, "block_size": 8, "max_num_seqs": 8, "look_ahead": False, "max_model_len": 100}
CASES = [("right", 16, {}), ("ngram", 8, {}), ("some", 8, PREEMPTION)]
SLOW_CASES = [
    ("some", 4, {}),
    ("random", 8, {}),
    ("eos", 8, {}),
    ("outside", 3, {}),
    ("right", 2, {"max_num_seqs": 32}),
    ("some", 16, {"budget": 8, "max_num_seqs": 3}),
    ("right", 8, {"num_mask_threads": 1, "enable_prefix_caching": False}),
]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES]


@pytest.mark.parametrize(("drafter", "window", "sizes"), CASES, ids=str)
def test_answers_are_those_without_drafts(drafter, window, sizes):
    expected, _ = without_drafts()
    engine = Drafting(drafter, window, **sizes)
    try:
        assert said(engine.run_all(REQUESTS)) == expected
        rows = engine.core.scheduler.config.max_num_seqs
        assert engine.workers.most_masks <= rows + 64
        assert engine.workers.window_masks > 0
        assert drafter not in ("right", "some") or engine.accepted > 100
        assert "look_ahead" not in sizes or engine.core.scheduler.counters.preemptions
        engine.until(lambda: engine.core.scheduler.is_idle)
    finally:
        engine.close()


@pytest.fixture
def drafting_engine():
    engine = Drafting("some", 8)
    yield engine
    engine.close()


def test_held_sequences_have_windows_of_one(drafting_engine, monkeypatch):
    """Every grammar is slow: a sequence is scheduled when its next mask is made, for one place."""
    expected, _ = without_drafts()
    engine, held = drafting_engine, []
    monkeypatch.setattr(mask_threads, "SLOW_S", -1.0)
    expect = engine.core._grammar.expect

    def watched(step, now):
        slots = engine.core.scheduler.slots
        ready = [row for row in step.mask_rows if slots.sequence(step.slots[row]).constraint.mask is not None]
        held.extend(step.has_window(np.asarray(ready, np.int32)).tolist())
        expect(step, now)

    monkeypatch.setattr(engine.core._grammar, "expect", watched)
    assert said(engine.run_all(REQUESTS)) == expected
    assert len(held) > 100 and not any(held)
    assert engine.accepted > 50  # of the others
    engine.until(lambda: engine.core.scheduler.is_idle and not engine.core._grammar._deferred)


def test_late_masks_drop_their_rows_and_change_nothing(drafting_engine, monkeypatch):
    """Some masks of windows are made some turns later than their drafts come."""
    expected, _ = without_drafts()
    engine, threads, withheld = drafting_engine, drafting_engine.grammars.mask_threads, []
    turn, submit = engine.core._grammar.turn, threads.submit

    def withhold(works):
        late = [work for work in works if work.window is not None and (work.row + work.step) % 7 == 0]
        withheld.extend([work, 4] for work in late)
        submit([work for work in works if work not in late])

    def count(now):
        for entry in withheld:
            entry[1] -= 1
        due = [entry for entry in withheld if not entry[1]]
        withheld[:] = [entry for entry in withheld if entry[1]]
        submit([work for work, _ in due])
        turn(now)

    monkeypatch.setattr(masks, "MASKS_LATE_S", 1e-9)
    monkeypatch.setattr(threads, "submit", withhold)
    monkeypatch.setattr(engine.core._grammar, "turn", count)
    assert said(engine.run_all(REQUESTS)) == expected
    assert engine.core.scheduler.counters.preemptions > 5
    engine.until(lambda: engine.core.scheduler.is_idle and not engine.core._grammar._deferred)


@pytest.mark.parametrize("awaits_drafts", [True, False])
def test_streams_go_on_where_a_worker_dies_amid_windows(drafting_engine, awaits_drafts):
    expected, _ = without_drafts()
    engine, core = drafting_engine, drafting_engine.core
    ids = [engine.submit(prompt, params) for prompt, params in REQUESTS]
    answer, deaths = engine.workers.answer, []

    def dies() -> bool:
        """A plan was sent, and masks that wait for drafts were asked for; or else the step's results are there."""
        steps = core._grammar._steps.values()
        if core._in_flight and awaits_drafts == any(waiting.drafts is not None for waiting in steps):
            deaths.append(len(engine.outputs))
            if len(deaths) == 8:
                core._replace_workers("killed")
                return True
        return answer()

    engine.workers.answer = dies
    engine.until(lambda: all(engine.has_ended(i, p.n) for i, (_, p) in zip(ids, REQUESTS, strict=True)))
    assert len(deaths) >= 8 and engine.workers.generation == 2
    results = [
        engine.errors.get(i) or [engine.outputs[i << 8 | n] for n in range(p.n)]
        for i, (_, p) in zip(ids, REQUESTS, strict=True)
    ]
    assert said(results) == expected


def test_a_mask_that_never_comes_ends_its_request_alone(drafting_engine, monkeypatch):
    expected, _ = without_drafts()
    engine, threads, asked = drafting_engine, drafting_engine.grammars.mask_threads, []
    victim, submit = list(ASKED).index("penalties") + 1, threads.submit  # its request's id

    def withhold(works):
        asked.extend(w for w in works if w.window is not None and w.seq.request_id == victim)
        lost = {id(work) for work in asked[4:]}
        submit([work for work in works if id(work) not in lost])

    monkeypatch.setattr(threads, "submit", withhold)
    monkeypatch.setattr(deferred, "MASK_TIMEOUT_S", 0.2)
    told = said(engine.run_all(REQUESTS))
    assert told.pop("penalties") == f"structured_outputs (json): {TOO_LATE}" and len(asked) == 5
    assert told == {name: answer for name, answer in expected.items() if name != "penalties"}

"""`quire serve` with drafts beside one without: equal answers, streamed or not, and what metrics and answers say of drafts."""

import json
import math
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from mtp_heads import mtp_model
from serving import SMALL, Served, until

from quire.enginecore.loading.model_files import BUNDLED

REPEATING = "one two three one two three one two"  # the model's answer repeats itself, too
NUM_TOKENS, NUM_DRAFTS = 48, 7
DRAFTS = {"prompt_lookup_min": 1, "prompt_lookup_max": 3, "enable_adaptive_verification": False}
FLAGS = (
    *("--spec-method", "ngram", "--spec-tokens", str(NUM_DRAFTS), "--speculative-config", json.dumps(DRAFTS)),
    *("--per-request-spec-decode-metrics", "detailed"),
)
RANDOM = {"temperature": 0.9, "seed": 5}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "greedy": {"logprobs": 3},
    "seeded": RANDOM | {"logprobs": 0},
    "filters": RANDOM | {"top_p": 0.9, "min_p": 0.02, "top_k": 50},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3, "logit_bias": {"300": 2}},
    "bad words": {"bad_words": ["juice", " two three"]},
    "n": RANDOM | {"n": 3, "logprobs": 1},
    "best of": RANDOM | {"n": 2, "best_of": 3},
    "prompts": {"prompt": [REPEATING, "The cat", REPEATING]},
    "stop": {"stop": ["juice", "never"]},
    "stop in a window": {"stop": ['", "tar'], "include_stop_str_in_output": True},
    "stop ids": {"stop_token_ids": [*range(4, 2816, 12)], "min_tokens": 8},
    "the model's own end": {"ignore_eos": False},
    "ids": {"return_token_ids": True, "echo": True},
    "one token": {"max_tokens": 1},
    "grammar": {"structured_outputs": {"regex": "(one two ){12}"}},
    "schema": RANDOM | {"structured_outputs": {"json": {"type": "array", "items": {"enum": ["one", "two"]}, "maxItems": 9}}},
    "choice": {"structured_outputs": {"choice": ["one two three", "one two", "three"]}, "ignore_eos": False},
    "logprobs of the prompt": {"prompt_logprobs": 1},
}


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[Served, Served]]:
    """One without drafts, and one with them."""
    with Served(*SMALL) as plain, Served(*SMALL, *FLAGS) as drafting:
        yield plain.ready(), drafting.ready()
        assert plain.end() == drafting.end() == 0


def is_same(a: Any, b: Any) -> bool:
    """Whether two JSON values are equal, numbers within 1e-4: rows of other sizes are summed in another order."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(is_same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(is_same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=0.0, abs_tol=1e-4)
    return bool(a == b)


def body(name: str, **more: Any) -> dict[str, Any]:
    return {"prompt": REPEATING, "max_tokens": NUM_TOKENS, "ignore_eos": True, **COMPLETIONS[name], **more}


@pytest.mark.parametrize("name", COMPLETIONS)
def test_an_answer_is_the_one_without_drafts(both: tuple[Served, Served], name: str) -> None:
    plain, drafting = (served.complete(**body(name)) for served in both)
    assert is_same(drafting["choices"], plain["choices"]), (drafting, plain)
    assert drafting["usage"] == plain["usage"] and "metrics" not in plain
    if name.startswith("stop"):
        assert [choice["finish_reason"] for choice in drafting["choices"]] == ["stop"]


def test_rows_with_grammars_have_drafts(both: tuple[Served, Served]) -> None:
    """Real workers wait for masks that wait for drafts, beside a request without a grammar."""
    plain, drafting = both
    with ThreadPoolExecutor() as pool:
        beside = pool.submit(drafting.complete, **body("seeded", max_tokens=400, logprobs=None))
        told = drafting.complete(**body("grammar"))
        beside.result()
    assert told["choices"] == plain.complete(**body("grammar"))["choices"]
    assert told["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 10


def test_a_chat_is_the_one_without_drafts(both: tuple[Served, Served]) -> None:
    question = {"messages": [{"role": "user", "content": f"Repeat: {REPEATING}"}], "temperature": 0, "logprobs": True}
    plain, drafting = (served.ask("POST", "/v1/chat/completions", question).json() for served in both)
    assert is_same(drafting["choices"], plain["choices"]) and drafting["usage"] == plain["usage"]


@pytest.mark.parametrize("name", ["greedy", "n", "stop", "stop in a window", "ids"])
def test_a_stream_says_what_an_answer_in_one_piece_says(both: tuple[Served, Served], name: str) -> None:
    _, drafting = both
    whole = drafting.complete(**body(name))
    texts = [""] * len(whole["choices"])
    ids, tokens, reasons, usage = [[] for _ in texts], [[] for _ in texts], [""] * len(texts), None
    with drafting.stream(**body(name, stream_options={"include_usage": True})) as stream:
        for event in stream:
            usage = event["usage"]
            for choice in event["choices"]:
                i = choice["index"]
                texts[i] += choice["text"]
                ids[i] += choice.get("token_ids", [])
                tokens[i] += choice["logprobs"]["tokens"] if choice["logprobs"] else []
                reasons[i] = choice["finish_reason"] or reasons[i]
        assert stream.done
    assert usage == whole["usage"]
    for i, choice in enumerate(whole["choices"]):
        assert (texts[i], reasons[i]) == (choice["text"], choice["finish_reason"])
        assert ids[i] == choice.get("token_ids", [])
        assert tokens[i] == (choice["logprobs"]["tokens"] if choice["logprobs"] else [])


def test_an_event_may_hold_several_tokens(both: tuple[Served, Served]) -> None:
    _, drafting = both
    with drafting.stream(**body("ids", echo=False)) as stream:
        sizes = [len(choice["token_ids"]) for event in stream for choice in event["choices"]]
    assert sum(sizes) == NUM_TOKENS and max(sizes) > 1


def counts_of(served: Served) -> dict[str, float]:
    """The counters of drafts, by name and place."""
    text = served.ask("GET", "/metrics").body.decode()
    found = re.findall(r'^vllm:spec_decode_num_(\w+)_total{.*?(?:position="(\d+)")?} (\S+)$', text, re.M)
    return {name + place: float(value) for name, place, value in found}


def test_counts_of_requests_add_up_to_those_of_the_server(both: tuple[Served, Served]) -> None:
    plain, drafting = both
    assert counts_of(plain) == {}
    before = until_quiet(drafting)
    told = [drafting.complete(**body(name))["metrics"]["speculative_decoding"] for name in ("greedy", "seeded", "greedy")]
    names = {"drafts": "num_spec_steps", "draft_tokens": "num_draft_tokens", "accepted_tokens": "num_accepted_draft_tokens"}
    expected = {ours: sum(each[name] for each in told) for ours, name in names.items()}
    until(lambda: all(counts_of(drafting)[name] - before[name] == number for name, number in expected.items()))
    counted = {name: number - before[name] for name, number in counts_of(drafting).items()}
    by_place = [counted[f"accepted_tokens_per_pos{place}"] for place in range(NUM_DRAFTS)]
    assert 0 < sum(by_place) == counted["accepted_tokens"] < counted["draft_tokens"]
    assert by_place == sorted(by_place, reverse=True)
    for each in told:
        assert (each["num_spec_tokens"], len(each["acceptance_histogram"])) == (NUM_DRAFTS, NUM_DRAFTS + 1)
        assert sum(each["per_step_accepted"]) == each["num_accepted_draft_tokens"]
        assert sum(each["per_step_drafted"]) == each["num_draft_tokens"]
        assert all(a <= d for a, d in zip(each["per_step_accepted"], each["per_step_drafted"], strict=True))
        assert 1 < each["mean_acceptance_length"] < NUM_DRAFTS + 1


def until_quiet(served: Served) -> dict[str, float]:
    """The counters once a heartbeat has told all of what ran before."""
    generated = served.metric("generation_tokens_total")
    generated = 0.0 if math.isnan(generated) else generated  # before the first heartbeat
    served.complete(REPEATING, max_tokens=1)
    until(lambda: served.metric("generation_tokens_total") > generated)
    return counts_of(served)


def test_a_draft_model_changes_no_answer(both: tuple[Served, Served]) -> None:
    """The model drafts for itself, so all of its drafts are right, but for near ties."""
    plain, _ = both
    drafts = json.dumps({"num_speculative_tokens": 4, "enable_adaptive_verification": False})
    with Served(*SMALL, "--spec-model", str(BUNDLED), "--speculative-config", drafts) as drafting:
        drafting.ready()
        for name in ("seeded", "penalties", "n", "stop ids", "logprobs of the prompt", "grammar"):
            counts = until_quiet(drafting)
            assert is_same(drafting.complete(**body(name))["choices"], plain.complete(**body(name))["choices"]), name
        assert counts["accepted_tokens"] >= 0.99 * counts["draft_tokens"] > 0  # without the grammar, of which it knows nothing
        assert drafting.end() == 0


@pytest.mark.parametrize("method", ["eagle3", pytest.param("draft_model", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_the_bundled_models_drafters_change_no_answer(both: tuple[Served, Served], method: str) -> None:
    plain, _ = both
    with Served(*SMALL, "--spec-method", method) as drafting:
        drafting.ready()
        for name in ("greedy", "penalties", "n"):
            counts = until_quiet(drafting)
            assert is_same(drafting.complete(**body(name))["choices"], plain.complete(**body(name))["choices"]), name
        assert counts["draft_tokens"] > 0
        assert drafting.end() == 0


@pytest.mark.slow
def test_a_models_own_layers_draft_for_it() -> None:
    """A hybrid's, told by the number of drafts alone."""
    folder = str(mtp_model("qwen3.5"))
    with Served(folder, *SMALL) as plain, Served(folder, *SMALL, "--spec-tokens", "2") as drafting:
        plain.ready(), drafting.ready()
        for name in ("greedy", "seeded", "n"):
            assert is_same(drafting.complete(**body(name))["choices"], plain.complete(**body(name))["choices"]), name
        assert until_quiet(drafting)["draft_tokens"] > 0
        assert plain.end() == drafting.end() == 0


def test_a_draft_model_with_other_tokens_ends_the_start_with_one_line(tmp_path) -> None:
    folder = tmp_path / "draft"
    shutil.copytree(BUNDLED, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**tokenizer, "normalizer": {"type": "NFC"}}))
    with Served(*SMALL, "--spec-model", str(folder)) as served:
        assert served.wait() != 0
        (line,) = (line for line in served.lines if "speculative" in line)
        assert f"--speculative-config: model {folder}: its tokenizer has other tokens" in line


def test_an_answer_of_several_sequences_tells_no_counts(both: tuple[Served, Served]) -> None:
    _, drafting = both
    assert drafting.complete(**body("n"))["metrics"] is None


def test_what_is_not_served_ends_the_start_with_one_line() -> None:
    with Served(*SMALL, "--speculative-config", '{"method": "eagle", "model": "x"}') as served:
        assert served.wait() == 2
        (line,) = (line for line in served.lines if "speculative" in line)
        assert "method 'eagle' is not served yet" in line

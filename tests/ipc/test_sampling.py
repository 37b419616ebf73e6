"""SamplingParams: defaults, every bound and its text, round trips, and what needs which part of the sampler."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.ipc import sampling
from quire.ipc.sampling import SamplingParams, check_against

NAN, INF = float("nan"), float("inf")


def test_defaults_are_vllms():
    p = SamplingParams()
    assert (p.n, p.temperature, p.top_p, p.top_k, p.min_p, p.max_tokens, p.min_tokens) == (1, 1.0, 1.0, 0, 0.0, 16, 0)
    assert (p.presence_penalty, p.frequency_penalty, p.repetition_penalty, p.seed) == (0.0, 0.0, 1.0, None)
    assert (p.logprobs, p.prompt_logprobs, p.logit_bias, p.allowed_token_ids, p.bad_words) == (None,) * 5
    assert (p.include_stop_str_in_output, p.ignore_eos, p.detokenize, p.skip_special_tokens) == (False, False, True, True)
    assert not p.stop and not p.stop_token_ids and p.spaces_between_special_tokens
    assert SamplingParams(seed=-1).seed is None
    assert not (p.is_greedy or p.needs_filter or p.has_penalties or p.needs_logits_processors)


def test_numbers_of_numpy_become_ones_that_can_be_sent():
    given = {
        "temperature": np.linspace(0, 1, 5)[2], "top_p": np.float32(0.5), "top_k": np.int32(3), "seed": np.int64(7),
        "max_tokens": np.arange(9)[8], "logprobs": np.uint8(2),
    }  # fmt: skip
    ids = np.array([4, 5])
    p = SamplingParams(**given, stop_token_ids=list(ids), allowed_token_ids=ids, logit_bias={ids[0]: np.float32(1.5), 6: 1})
    want = SamplingParams(temperature=0.5, top_p=0.5, top_k=3, seed=7, max_tokens=8, logprobs=2, stop_token_ids=[4, 5],
                          allowed_token_ids=[4, 5], logit_bias={4: 1.5, 6: 1})  # fmt: skip
    assert p == want and msgspec.msgpack.decode(msgspec.msgpack.encode(p), type=SamplingParams) == want
    p.temperature = np.float64(0.25)
    assert type(p.temperature) is float
    for wrong in ({"n": np.float64(1)}, {"n": np.int64(129)}, {"top_p": np.float32("nan")}, {"temperature": np.bool_(True)},
                  {"seed": np.uint64(2**63)}, {"stop_token_ids": np.array([1.0])}, {"allowed_token_ids": np.array([-1])},
                  {"logit_bias": {np.float64(5): 1.0}}):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(wrong))):
            SamplingParams(**wrong)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("n", [1, 128], [0, -1, 129, 1.0, True, None, "1"]),
        ("temperature", [0, 0.0, 1, 2.5, 1e6], [-0.1, NAN, INF, -INF, True, None, "0"]),
        ("top_p", [1e-9, 0.5, 1, 1.0], [0, 0.0, -0.5, 1.01, NAN, None]),
        ("top_k", [-1, 0, 1, 10**9], [-2, 1.5, NAN, None]),
        ("min_p", [0, 0.5, 1], [-0.1, 1.1, NAN]),
        ("presence_penalty", [-2, 0, 2], [-2.1, 2.1, NAN, INF]),
        ("frequency_penalty", [-2, 0, 2], [-2.1, 2.1, NAN, INF]),
        ("repetition_penalty", [1e-3, 1, 10], [0, -1, NAN, INF]),
        ("seed", [None, 0, -(2**63), 2**63 - 1], [2**63, -(2**63) - 1, 1.0, True]),
        ("max_tokens", [None, 1, 10**9], [0, -1, 1.0, True]),
        ("min_tokens", [0, 16], [-1, 17, 1.0]),
        ("logprobs", [None, -1, 0, 128], [-2, 129, 1.0, True]),
        ("prompt_logprobs", [None, -1, 0, 128], [-2, 129, 1.0]),
        ("stop", [None, [], "x", ["a", "b"], ["x" * 1024], ["x"] * 64], [[""], "", ["x" * 1025], ["x"] * 65, [1], 5, {"a": 1}]),
        ("stop_token_ids", [None, [], [0, 2**31 - 1], [1] * 240], [[-1], [2**31], [1] * 241, [True], [1.0], ["1"]]),
        ("allowed_token_ids", [None, [0], list(range(1000))], [[], [-1], ["x"]]),
        (
            "logit_bias",
            [None, {}, {5: 100.0, 6: -100}],
            [{5: 100.1}, {5: NAN}, {-1: 1.0}, {5: "x"}, dict.fromkeys(range(1025), 1.0)],
        ),
        ("bad_words", [None, [], ["x"]], [[""], ["x"] * 257, [1]]),
        (
            "bad_words_token_ids",
            [None, [], [[1]], [[1] * 16] * 256],
            [[[]], [[1] * 17], [[1]] * 257, [[-1]], [["x"]]],
        ),
    ],
)
def test_bounds(name, good, bad):
    for value in good:
        kept = getattr(SamplingParams(**{name: value}), name)
        assert kept == ([value] if isinstance(value, str) else value)
    for value in bad:
        with pytest.raises(ValueError, match=name.removesuffix("_token_ids") if name.startswith("bad") else name):
            SamplingParams(**{name: value})


def test_error_says_what_is_allowed():
    with pytest.raises(ValueError, match=r"^top_p must be greater than 0\.0 and at most 1\.0, got 0$"):
        SamplingParams(top_p=0)
    with pytest.raises(ValueError, match=r"^min_tokens must be at most max_tokens \(5\), got 6$"):
        SamplingParams(min_tokens=6, max_tokens=5)
    with pytest.raises(ValueError, match=r"^n must be an integer, got True$"):
        SamplingParams(n=True)


@pytest.mark.parametrize("name", ["max_tokens", "top_k", "temperature", "repetition_penalty"])
def test_an_integer_that_no_message_can_hold_is_refused_by_name_and_not_by_the_encoder(name):
    with pytest.raises(ValueError, match=f"^{name} must fit 64 bits$"):
        SamplingParams(**{name: 1 << 63})
    msgspec.msgpack.encode(SamplingParams(**{name: (1 << 63) - 1}))


def test_tiny_temperatures_become_greedy_or_are_raised():
    assert SamplingParams(temperature=1e-6).temperature == 0.0
    assert SamplingParams(temperature=1e-6).is_greedy
    assert SamplingParams(temperature=1e-5).temperature == sampling.MIN_TEMPERATURE
    assert SamplingParams(temperature=0.5).temperature == 0.5


def test_what_the_sampler_must_be_able_to_do():
    assert (
        SamplingParams(top_k=5).needs_filter
        and SamplingParams(top_p=0.5).needs_filter
        and SamplingParams(min_p=0.1).needs_filter
    )
    assert not SamplingParams(top_k=5, top_p=0.5, min_p=0.1, temperature=0).needs_filter
    for one in ({"presence_penalty": 1}, {"frequency_penalty": -1}, {"repetition_penalty": 1.1}):
        assert SamplingParams(**one).has_penalties and SamplingParams(**one).needs_logits_processors
    for one in ({"logit_bias": {1: 2}}, {"allowed_token_ids": [1]}, {"bad_words_token_ids": [[1]]}, {"min_tokens": 1}):
        assert SamplingParams(**one).needs_logits_processors and not SamplingParams(**one).has_penalties
    assert not SamplingParams(stop=["x"], stop_token_ids=[1], logprobs=3).needs_logits_processors


def test_ids_are_checked_against_the_vocabulary():
    for field in (
        {"stop_token_ids": [1, 100]},
        {"allowed_token_ids": [100]},
        {"logit_bias": {100: 1.0}},
        {"bad_words_token_ids": [[1], [5, 100]]},
    ):
        check_against(SamplingParams(**field), vocab_size=101, max_logprobs=20)
        with pytest.raises(ValueError, match="100, outside the vocabulary of 100"):
            check_against(SamplingParams(**field), vocab_size=100, max_logprobs=20)


def test_logprobs_are_checked_against_the_engines_own_cap():
    for name in ("logprobs", "prompt_logprobs"):
        check_against(SamplingParams(**{name: 5}), vocab_size=10, max_logprobs=5)
        with pytest.raises(ValueError, match=f"^{name} must be at most 4, got 5$"):
            check_against(SamplingParams(**{name: 5}), vocab_size=10, max_logprobs=4)
        with pytest.raises(ValueError, match=f"^{name} must be"):  # the core gets a number
            check_against(SamplingParams(**{name: -1}), vocab_size=10, max_logprobs=4)


ids = st.lists(st.integers(0, 2**31 - 1), max_size=5)
params = st.builds(
    SamplingParams,
    n=st.integers(1, 128),
    temperature=st.floats(0, 100),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(-1, 10**6),
    min_p=st.floats(0, 1),
    presence_penalty=st.floats(-2, 2),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    stop=st.none() | st.lists(st.text(min_size=1, max_size=5), max_size=3),
    stop_token_ids=st.none() | ids,
    max_tokens=st.none() | st.integers(1, 10**6),
    logprobs=st.none() | st.integers(0, 20),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 100), max_size=4),
    bad_words_token_ids=st.none() | st.lists(ids.filter(bool), max_size=3),
)


@settings(max_examples=200, deadline=None)
@given(params)
def test_round_trip_over_the_wire(p):
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(p), type=SamplingParams) == p


def test_a_field_is_set_within_its_bounds_only_and_a_copy_is_its_own():
    p = SamplingParams(min_tokens=2)
    copy = p.clone()
    p.max_tokens, p.stop, p.temperature = 100, "x", 1e-6
    assert (p.max_tokens, p.stop, p.temperature) == (100, ["x"], 0.0)
    assert copy == SamplingParams(min_tokens=2) != p
    for name, value, why in (("top_p", 2, "top_p must be"), ("max_tokens", 1, "min_tokens must be at most max_tokens")):
        with pytest.raises(ValueError, match=why):
            setattr(p, name, value)
    with pytest.raises(AttributeError, match="no field 'max_token'"):
        p.max_token = 3  # type: ignore[attr-defined]
    assert (p.top_p, p.max_tokens) == (1.0, 100)


def test_from_optional_takes_none_for_a_default_and_ids_that_are_texts():
    p = SamplingParams.from_optional(n=None, top_p=0.5, max_tokens=None, logit_bias={"5": 300, 6: -1})
    assert p == SamplingParams(top_p=0.5, max_tokens=None, logit_bias={5: 100.0, 6: -1})
    assert SamplingParams.from_optional() == SamplingParams()
    with pytest.raises(ValueError, match="top_p must be"):
        SamplingParams.from_optional(top_p=2)
    with pytest.raises(ValueError, match="use n"):
        SamplingParams.from_optional(best_of=3)


@pytest.mark.parametrize("field", [{"output_kind": 1}, {"structured_outputs": {"json": {}}}])
def test_what_is_of_another_type_is_refused_by_name(field):
    with pytest.raises(ValueError, match=f"{next(iter(field))} must be"):
        SamplingParams(**field)


def test_positional_arguments_and_unknown_fields_are_refused():
    with pytest.raises(ValueError, match="by their names"):
        SamplingParams(1)
    with pytest.raises(ValueError, match="use n"):
        SamplingParams(best_of=3)

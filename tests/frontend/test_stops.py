"""Stop strings and stop tokens: what is shown, what is held back, and how many tokens are kept."""

import pytest
import toy_tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.frontend.text.detokenizer import OutputText, StopChecker
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.sampling import SamplingParams

TOKENIZER = Tokenizer(toy_tokenizers.byte_level())
EOS = TOKENIZER.backend.token_to_id("</s>")
MANY = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
LETTERS = st.text(st.sampled_from("ab"), min_size=1, max_size=5)


def first_match(text: str, stops: list[str]) -> tuple[int, str] | None:
    """(end, string) of the match that is complete first; the longest of those that end there."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            return end, max(found, key=len)
    return None


def could_become(text: str, stops: list[str]) -> int:
    """Length of the longest end of the text that is the beginning of a stop string."""
    return max(k for s in stops for k in range(len(s)) if text.endswith(s[:k]))


def run(parts: list[str], stops: list[str], include: bool = False) -> tuple[list[str], str | None]:
    checker, shown = StopChecker(stops, include), []
    for part in parts:
        shown.append(checker.feed(part))
        if checker.found is not None:
            return shown, checker.found
    return [*shown, checker.flush()], None


@MANY
@given(parts=st.lists(st.text(st.sampled_from("abc"), max_size=4), max_size=8), stops=st.lists(LETTERS, min_size=1, max_size=3))
@pytest.mark.parametrize("include", [False, True])
def test_the_first_complete_match_ends_the_text_however_it_is_cut(parts: list[str], stops: list[str], include: bool) -> None:
    text, match = "".join(parts), first_match("".join(parts), stops)
    shown, found = run(parts, stops, include)
    if match is None:
        assert (found, "".join(shown)) == (None, text)
    else:
        end, stop = match
        assert (found, "".join(shown)) == (stop, text[: end if include else end - len(stop)])


@MANY
@given(text=st.text(st.sampled_from("abc"), max_size=12), stops=st.lists(LETTERS, min_size=1, max_size=3))
def test_exactly_what_may_become_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    checker, seen, shown = StopChecker(stops), "", ""
    for char in text:
        seen += char
        shown += checker.feed(char)
        if checker.found is not None:
            return
        assert len(seen) - len(shown) == could_become(seen, stops)


def test_what_was_held_back_comes_when_it_proves_harmless() -> None:
    checker = StopChecker(["STOP"])
    assert [checker.feed(t) for t in ["aS", "T", "Ox", "ST"]] == ["a", "", "STOx", ""]
    assert checker.flush() == "ST"


def test_a_disarmed_checker_lets_a_whole_stop_string_pass_but_remembers_its_beginning() -> None:
    checker = StopChecker(["ab"])
    assert checker.feed("ab", armed=False) == "ab"
    assert checker.feed("a", armed=False) == ""
    assert checker.feed("b") == "" and checker.found == "ab"


def test_long_stop_strings_cost_a_step_a_character() -> None:
    stop = "a" * 1023 + "b"
    checker = StopChecker([stop])
    shown = checker.feed("a" * 5000)
    assert len(shown) == 5000 - 1023
    assert checker.feed("b") == "" and checker.found == stop


# ------------------------------------------------------------------------------------------------- over tokens
def output(**params: object) -> OutputText:
    return OutputText(TOKENIZER, SamplingParams(**params), TOKENIZER.encode("hello"))


def test_a_stop_string_across_tokens_counts_the_tokens_through_the_one_that_completes_it() -> None:
    out = output(stop=["t, w"])
    tokens = [TOKENIZER.encode(t)[0] for t in [" the", " cat", ",", " world", " the"]]
    assert [out.push([t]) for t in tokens[:3]] == [" the", " ca", ""]
    assert out.push(tokens[3:]) == ""
    assert (out.stop_string, out.kept_tokens) == ("t, w", 4)


def test_merged_tokens_stop_where_single_ones_do() -> None:
    tokens = TOKENIZER.encode(" the cat, world!!")
    out = output(stop=["!", ","], include_stop_str_in_output=True)
    assert out.push(tokens, finished=True) == " the cat,"
    assert (out.stop_string, out.kept_tokens) == (",", 3)


def test_a_stop_string_within_the_first_min_tokens_is_passed_over() -> None:
    out = output(stop=["the"], min_tokens=2)
    tokens = TOKENIZER.encode(" the cat the")
    assert "".join(out.push([t]) for t in tokens) == " the cat "
    assert (out.stop_string, out.kept_tokens) == ("the", 3)


def test_text_held_back_at_the_end_is_shown() -> None:
    out = output(stop=["cats"])
    assert out.push(TOKENIZER.encode(" cat"), finished=True) == " cat"
    assert out.stop_string is None


@pytest.mark.parametrize(("include", "expected"), [(False, " the"), (True, " the cat")])
def test_a_stop_tokens_own_text_is_left_out_unless_wanted(include: bool, expected: str) -> None:
    out = output(include_stop_str_in_output=include)
    assert out.push(TOKENIZER.encode(" the cat"), finished=True, stop_token=True) == expected
    assert out.kept_tokens == 2


def test_an_end_of_sequence_token_is_shown_only_if_both_are_asked_for() -> None:
    ids = [*TOKENIZER.encode(" the"), EOS]
    for skip, include, expected in [(True, True, " the"), (False, False, " the"), (False, True, " the</s>")]:
        out = output(skip_special_tokens=skip, include_stop_str_in_output=include)
        assert out.push(ids, finished=True, stop_token=True) == expected


def test_half_a_character_before_a_stop_token_becomes_the_replacement_character() -> None:
    half = [i for i in range(TOKENIZER.vocab_size) if TOKENIZER.token_bytes(i) == b"\xf0"]
    out = output(stop=["zzz"])
    assert out.push([*half, EOS], finished=True, stop_token=True) == "�"

"""How flags' values are written: vLLM's spellings, dotted keys of JSON flags, and what is refused."""

import argparse
import io
import json
import logging
from contextlib import redirect_stderr

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.ipc.config import EngineConfig, add_engine_arguments, engine_config_from
from quire.ipc.process.flags import human_int, json_flags, merged, normal_words, split_flag
from quire.ipc.process.logs import set_up_logging


def parsed(*words: str) -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    return engine_config_from(parser.parse_args(normal_words(words, json_flags(parser))))


@pytest.mark.parametrize(
    ("text", "value"),
    [("8192", 8192), ("8k", 8000), ("8K", 8192), ("25.6k", 25600), ("1M", 1 << 20), ("1m", 10**6), ("2G", 2 << 30),
     ("1.5g", 1_500_000_000), ("1T", 1 << 40), ("0", 0)],
)  # fmt: skip
def test_numbers_as_people_write_them(text, value):
    assert human_int(text) == value


@pytest.mark.parametrize("text", ["", "k", "1.5", "1.5K", "8kk", "8 k", "nan", "1e400k", "infk", "0x10", "1.0001k"])
def test_numbers_that_are_none(text):
    with pytest.raises(argparse.ArgumentTypeError, match="whole number"):
        human_int(text)


@given(st.integers(0, 1 << 40))
def test_a_plain_number_is_itself(number):
    assert human_int(str(number)) == number


def test_vllms_spellings():
    config = parsed(
        "--max_model_len=8k", "--max-num_seqs", "1K", "-tp", "1", "--dtype", "half", "--load_format", "safetensors",
        "--kv-cache-memory-bytes", "2G", "--no-enforce-eager", "--uvicorn-log-level", "trace", "--max-num-queued-reqs", "7",
    )  # fmt: skip
    assert (config.max_model_len, config.max_num_seqs, config.dtype, config.load_format) == (8000, 1024, "float16", "auto")
    assert (config.kv_cache_memory_bytes, config.enforce_eager, config.log_level) == (2 << 30, False, "debug")
    assert config.max_num_waiting == 7
    assert parsed("--max-model-len", "-1") == parsed("--max-model-len=auto") == parsed()
    assert parsed("--dtype=float").dtype == "float32"


def test_json_flags_take_their_keys_one_by_one():
    whole = parsed("--hf-overrides", '{"a_b": {"c": 1.5, "d": "x"}, "e": [1, 2]}')
    parts = parsed("--hf_overrides.a_b.c", "1.5", "--hf-overrides.a_b.d=x", "--hf-overrides.e+", "1", "--hf-overrides.e+=2")
    assert whole.hf_overrides == parts.hf_overrides == {"a_b": {"c": 1.5, "d": "x"}, "e": [1, 2]}
    assert parsed("--override-generation-config.temperature=0.5").override_generation_config == {"temperature": 0.5}
    for text in ("nonsense", "[1]", "3", "[" * 100_000):
        with redirect_stderr(io.StringIO()) as said, pytest.raises(SystemExit):
            parsed("--hf-overrides", text)
        assert "--hf-overrides" in said.getvalue() and "JSON" in said.getvalue()


def test_values_are_left_as_they_are():
    assert normal_words(["--a_b=--c_d", "e_f", "-x_y", "--", "--g_h"], frozenset()) == [
        "--a-b=--c_d", "e_f", "-x_y", "--", "--g_h",
    ]  # fmt: skip
    assert split_flag("--a_b.c_d.e=f=g") == ("--a-b", "c_d.e", "f=g")
    assert split_flag("word") == ("word", "", None)
    assert merged({"a": {"b": 1}, "c": 2}, {"a": {"d": 3}, "c": {"e": 4}}) == {"a": {"b": 1, "d": 3}, "c": {"e": 4}}


@pytest.mark.parametrize(
    "wrong",
    [
        ("--dtype", "int8"),
        ("--load-format", "pt"),
        ("--log-level", "loud"),
        ("--max-num-seqs", "many"),
        ("--max-num-seqs", "1.5K"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(wrong):
    with redirect_stderr(io.StringIO()) as said, pytest.raises(SystemExit):
        parsed(*wrong)
    assert f"argument {wrong[0]}" in said.getvalue()


@pytest.mark.parametrize("field", ["kv_cache_memory_bytes", "long_prefill_token_threshold", "seed"])
def test_bounds(field):
    with pytest.raises(ValueError, match=f"--{field.replace('_', '-')}"):
        EngineConfig(**{field: -1})


def test_logs_as_json(capfd):
    logger = logging.getLogger("quire")
    before = logger.handlers[:], logger.level, logger.propagate
    try:
        set_up_logging("warning", "json")
        logging.getLogger("quire.x").info("not shown")
        try:
            raise ValueError("why")
        except ValueError:
            logging.getLogger("quire.x").exception('two\nlines "%s"', "é")
    finally:
        logger.handlers[:], logger.propagate = before[0], before[2]
        logger.setLevel(before[1])
    (line,) = capfd.readouterr().err.splitlines()
    said = json.loads(line)
    assert (said["level"], said["logger"], said["message"]) == ("ERROR", "quire.x", 'two\nlines "é"')
    assert "ValueError: why" in said["exception"] and said["time"][10] == "T"

"""The flags of adapters: what they say, and what is refused with one line."""

import pytest

from quire.ipc.adapters import problem_with_name
from quire.ipc.config import EngineConfig
from quire.ipc.lora_flags import LoraModule, parse_module


def test_a_module_has_a_name_and_a_path():
    assert parse_module("sql=/a/b=c") == LoraModule("sql", "/a/b=c")
    assert parse_module('{"name": "sql", "path": "/a", "base_model_name": "x"}') == LoraModule("sql", "/a")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sql", "it must be NAME=PATH"),
        ("=/a", "1 to 256 characters"),
        ("a,b=/a", "no comma"),
        ('{"name": "a"}', "needs name and path"),
        ('{"name": "a", "path": "/a", "rank": 3}', "needs name and path"),
        ('{"name"', "no JSON object"),
    ],
)
def test_another_module_is_refused(text, said):
    with pytest.raises(ValueError, match=said):
        parse_module(text)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_loras": 0}, "--max-loras must be between"),
        ({"max_lora_rank": 1000}, "--max-lora-rank must be between"),
        ({"max_loras": 8, "max_cpu_loras": 4}, "--max-cpu-loras must be at least"),
        ({"enable_lora": False, "lora_modules": ["a=/a"]}, "--lora-modules needs --enable-lora"),
        ({"enable_lora": False, "lora_dirs": ["/a"]}, "--lora-dirs needs --enable-lora"),
        ({"enable_lora": False, "lora_hub": ["a"]}, "--lora-hub needs --enable-lora"),
        ({"lora_hub": ["a", "owner/name"]}, "--lora-hub 'owner/name': an owner"),
        ({"lora_on_demand": True}, "--lora-on-demand needs --lora-dirs"),
        ({"lora_modules": ["a=/a", "a=/b"]}, "the name 'a' is taken"),
        ({"lora_modules": ["base=/a"], "served_model_name": ["base"]}, "the name 'base' is taken"),
    ],
)
def test_settings_that_can_never_work_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        EngineConfig(**{"enable_lora": True, **options})


def test_names_that_metrics_and_routes_can_show():
    assert problem_with_name("org/sql-v2.1 (é)") is None
    for name in ("", "a,b", 'a"b', "a'b", "a\nb", "x" * 257, "\ud800"):
        assert problem_with_name(name)

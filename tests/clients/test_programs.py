"""What `make test-clients` checks, and what the page about clients says of it. The clients themselves are not run here."""

import json
from pathlib import Path

import numpy as np
import pytest
import run_embedders
from coding_agents import AGENTS
from installed import EMBEDDERS, HERE, REQUIREMENTS
from run_clients import LACKS, NPM, row_of, shown, wrong_with

PAGE = (Path(__file__).parents[2] / "docs" / "clients.md").read_text()
PACKAGES = json.loads((HERE / "package.json").read_text())["dependencies"]
ROWS = [
    line
    for line in PAGE.partition("## Run with their newest releases")[2].partition("## Programs")[0].splitlines()
    if "|" in line
]

CHAT = {"whole": "a b", "parts": ["a", " b"]}
TOOL = {"name": "get_weather", "arguments": {"city": "Paris"}}
FOUND = {"version": "1", "chat": CHAT, "tool": TOOL, "structured": {"name": "Ann", "age": 7}}


def test_every_client_has_a_script_and_a_line_with_its_version_on_the_page():
    pinned = [words.split("==") for words in " ".join(REQUIREMENTS.values()).split()]
    for package, version in pinned:
        assert any(version in row for row in ROWS), package
    for name in REQUIREMENTS:
        assert (HERE / f"ask_{name.replace('-', '_')}.py").exists()
        assert any(row.startswith(f"| {name} ") for row in ROWS), name
    for name in NPM:
        assert (HERE / f"ask_{name.replace('-', '_')}.mjs").exists()
    for package, version in PACKAGES.items():
        assert package == "zod" or any(version in row for row in ROWS), package
    assert {agent.package for agent in AGENTS.values()} <= set(PACKAGES) and set(LACKS) <= {*REQUIREMENTS, *AGENTS}


def test_every_client_for_vectors_has_a_script_and_its_versions_on_the_page():
    for name, wanted in EMBEDDERS.items():
        assert (HERE / f"{name.replace('-', '_')}.py").exists()
        for package, _, version in (word.partition("==") for word in wanted.split()):
            assert not version or any(f"`{package}` {version}" in row for row in ROWS), package


def test_wrong_vectors_and_orders_are_seen():
    vectors = np.eye(3)
    vectors[2, 0] = 0.5
    assert run_embedders.wrong_with("embed", vectors.tolist(), vectors) == ""
    assert "off" in run_embedders.wrong_with("tei", (vectors + 1e-3).tolist(), vectors)
    assert "shape" in run_embedders.wrong_with("tei", vectors[:2].tolist(), vectors)
    assert run_embedders.wrong_with("rerank", [0, 2], vectors) == "" != run_embedders.wrong_with("rerank", [2, 0], vectors)


def test_the_lock_has_the_versions_that_are_wanted():
    lock = json.loads((HERE / "package-lock.json").read_text())["packages"]
    assert {name: lock[f"node_modules/{name}"]["version"] for name in PACKAGES} == PACKAGES


@pytest.mark.parametrize(
    ("part", "value", "said"),
    [
        ("chat", CHAT, ""),
        ("chat", {"whole": "a c", "parts": ["a", " b"]}, "the stream has 'a b'"),
        ("chat", {"whole": "a b", "parts": ["a b"]}, "in one part"),
        ("chat", {"whole": "", "parts": []}, "the stream has ''"),
        ("chat", {"whole": None, "parts": []}, "the stream has ''"),
        ("tool", TOOL, ""),
        ("tool", {"name": "get_time", "arguments": {"city": "Paris"}}, "called get_time"),
        ("tool", {"name": "get_weather", "arguments": {"city": 3}}, "3 is not of type 'string'"),
        ("tool", {"name": "get_weather", "arguments": {}}, "'city' is a required property"),
        ("tool", {"name": "Read", "arguments": {"a": 1}, "wanted": "Read", "schema": {"required": ["b"]}}, "'b' is a required"),
        ("structured", FOUND["structured"], ""),
        ("structured", {"name": "Eve", "age": 7}, "'Eve' is not one of"),
        ("structured", {"name": "Ann", "age": 7, "more": 1}, "Additional properties"),
        ("structured", '{"name": "Ann", "age": 7}', "is not of type 'object'"),
    ],
)
def test_a_wrong_answer_is_seen(part, value, said):
    found = wrong_with(part, value)
    assert found.startswith(said) if said.startswith(("the", "called")) else said in found
    assert bool(found) == bool(said)


def test_a_row_says_what_is_missing_or_failed(capsys):
    assert row_of("openai", str, lambda _: FOUND).is_fine
    assert not row_of("openai", str, lambda _: {**FOUND, "structured": None}).is_fine
    assert row_of("aider", str, lambda _: {"version": "1", "chat": CHAT}).is_fine

    def fail(_: str) -> dict:
        raise AssertionError("no server")

    assert not shown(row_of("openai", str, fail)).is_fine
    said = capsys.readouterr().out
    assert said.count("AssertionError: no server") == 1 and said.count("NO") == 3

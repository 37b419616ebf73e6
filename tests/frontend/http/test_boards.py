"""Boards and alert rules find their metrics: ours as files, vLLM's published ones by the names that their expressions use."""

import asyncio
import json
import re
from pathlib import Path

import fake_client as http
import pytest
import yaml
from fake_client import CHAT, HELLO
from metrics_cases import FullClient, samples

from quire.frontend.http.api.metrics import metric_names

ROOT = Path(__file__).parents[3]
BOARD = json.loads((ROOT / "deploy/grafana/quire.json").read_text())
GROUPS = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text())["groups"]
RULES = [rule for group in GROUPS for rule in group["rules"]]
PAGE = (ROOT / "docs/metrics.md").read_text()

VLLM_BOARDS = [line for line in (Path(__file__).parent / "vllm_boards.txt").read_text().split("\n") if line and line[0] != "#"]
# What their variables offer as latency objectives: bounds that must be buckets, written as they write them.
TTFT_OBJECTIVES = ["0.1", "0.25", "0.5", "0.75", "1.0", "2.5", "5.0", "10.0"]
TPOT_OBJECTIVES = ["0.025", "0.05", "0.075", "0.1", "0.15", "0.2", "0.3", "0.5"]

OF_PROMETHEUS = {"up"}
NAME = re.compile(r"\b(?:(?:vllm|quire):\w+|(?:http|process)_\w+|up)(?=[\[{ ),=]|$)")


@pytest.fixture(scope="module")
def shown() -> dict[str, float]:
    async def main() -> str:
        api = http.Api(FullClient())
        await api.events(CHAT, HELLO)
        return (await api.ask("GET", "/metrics")).body.decode()

    return samples(asyncio.run(main()))


@pytest.fixture(scope="module")
def names(shown) -> set[str]:
    return {key.split(",")[0] for key in shown}


def board_expressions() -> list[str]:
    return [target["expr"] for panel in BOARD["panels"] for target in panel.get("targets", [])]


def variable_expressions() -> list[str]:
    return [v["definition"] for v in BOARD["templating"]["list"] if v["type"] == "query"]


@pytest.mark.parametrize("expression", board_expressions() + variable_expressions() + [rule["expr"] for rule in RULES])
def test_an_expression_names_only_what_is_there(expression, names):
    used = set(NAME.findall(expression))
    assert used and used - names - OF_PROMETHEUS == set()
    for opening, closing in ("()", "[]", "{}"):
        assert expression.count(opening) == expression.count(closing)


def test_vllms_boards_find_their_metrics(names):
    assert [name for name in VLLM_BOARDS if name not in names] == []


def test_vllms_objectives_are_buckets(shown):
    for name, bounds in (
        ("vllm:time_to_first_token_seconds", TTFT_OBJECTIVES),
        ("vllm:request_time_per_output_token_seconds", TPOT_OBJECTIVES),
    ):
        for bound in bounds:
            assert f"{name}_bucket,engine=0,le={bound},model_name=tiny" in shown


def test_the_board_fits_together():
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24 and not cells & taken
        taken |= cells


def test_every_alert_says_what_it_means():
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"]


def test_the_page_lists_what_is_there(names):
    """Each family once in a table, and nothing besides; what is said not to be here is not here."""
    here, not_here = PAGE.split("## Not here")
    listed = re.findall(r"^\| `([\w:]+)`", here, re.M)
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}
    assert sorted(listed) == sorted(families)
    absent = re.findall(r"`([\w:*]+)`", "".join(line.split("|")[1] for line in not_here.splitlines() if line.startswith("| `")))
    assert absent and not {name for name in absent if any(re.fullmatch(name.replace("*", ".*"), f) for f in families)}
    assert len(metric_names.HISTOGRAMS) < len(listed)

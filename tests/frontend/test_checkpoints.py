"""Checkpoints' chat templates choose the right parsers, which read what these templates write; docs/models.md names all."""

import json
import re
from pathlib import Path

import pytest
from checkpoint_templates import CHECKPOINTS
from tool_cases import summary

from quire.frontend.text.chat_template import ChatTemplate
from quire.frontend.text.harmony.tokens import NAMES as HARMONY
from quire.frontend.text.reasoning_parsers.choice import REASONING_PARSERS, reasoning_parser_of
from quire.frontend.text.tool_parsers.choice import TOOL_PARSERS, tool_parser_of

SCHEMAS = {"get_weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}
ARGUMENTS = {"city": "Bonn ✓", "days": 5}
FUNCTION = {"name": "get_weather", "arguments": json.dumps(ARGUMENTS)}
CALLS = {"role": "assistant", "tool_calls": [{"id": "functions.get_weather:0", "type": "function", "function": FUNCTION}]}
ASKS = {"role": "user", "content": "What is the weather in Bonn?"}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMAS["get_weather"]}}]
MODELS = Path(__file__).parents[2] / "docs" / "models.md"


@pytest.mark.parametrize(("source", "tools", "reasoning"), [c[1:] for c in CHECKPOINTS], ids=[c[0] for c in CHECKPOINTS])
def test_a_checkpoints_template_chooses_its_parsers(source, tools, reasoning):
    assert tool_parser_of(source) is (TOOL_PARSERS[tools] if tools else None)
    assert reasoning_parser_of(source) is (REASONING_PARSERS[reasoning] if reasoning else None)


@pytest.mark.parametrize(("source", "tools"), [c[1:3] for c in CHECKPOINTS if c[2] and "m.tool_calls" in c[1]])
def test_the_parser_reads_the_call_that_the_template_writes(source, tools):
    template = ChatTemplate(source, {})
    said = template.render([ASKS, {"role": "assistant", "content": "MARK"}], tools=TOOLS, add_generation_prompt=False)
    written = template.render([ASKS, CALLS], tools=TOOLS, add_generation_prompt=False)[said.index("MARK") :]
    parser = TOOL_PARSERS[tools](SCHEMAS)
    events = parser.feed(written) + parser.finish()
    _, calls = summary(events)
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("get_weather", ARGUMENTS)]


def rows_of(page: str, heading: str) -> list[list[str]]:
    """The rows of the tables below a heading, down to the next one."""
    part = f"\n{page}".split(f"\n{heading}\n", 1)[1].split("\n## ", 1)[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line.startswith("| ")]


def test_each_family_has_its_parsers_or_a_line_that_says_no():
    page = MODELS.read_text()
    families = [row[0] for row in rows_of(page, "# Models") if row[0] != "family"]
    listed = {row[0]: row[1:] for row in rows_of(page, "## Tool calls and reasoning") if row[0] != "family"}
    assert len(families) > 30 and set(families) <= set(listed), set(families) - set(listed)
    for family, (tools, reasoning) in listed.items():
        for cell, known in ((tools, TOOL_PARSERS), (reasoning, REASONING_PARSERS)):
            names = re.findall(r"`([^`]+)`", cell)
            assert set(names) <= set(known) | HARMONY, (family, cell)
            assert names or cell.startswith("no"), (family, cell)

"""The pages in docs/: what is made from the code is as the code is, nothing is missing on them, and links lead somewhere."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from error_codes import ERROR_CODES
from field_notes import ANSWERS, FIELDS_OF, ROUTE_NOTES
from field_table import FIELDS
from flag_notes import FLAG_NOTES

from quire.enginecore.cli import command_parser
from quire.frontend.cli.main import _parser, command_of
from quire.frontend.client.beam_search import MAX_BEAM_WIDTH
from quire.frontend.http.api.bodies.schemas import MAX_ITEMS, MAX_PROMPTS, MAX_SEQUENCES
from quire.frontend.http.api.routes import ROUTES
from quire.frontend.http.api.tools.tool_use import MAX_TOOLS_BYTES
from quire.ipc.sampling import (
    BOUNDS,
    MAX_EXTRA_ARGS,
    MAX_EXTRA_ARGS_BYTES,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from quire.ipc.step.sections import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIAS
from quire.ipc.structured_outputs import MAX_GRAMMAR_BYTES, MAX_GRAMMAR_DEPTH

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
VLLM = json.loads((DOCS / "tools/vllm_names.json").read_text())
TEXT = {path.name: path.read_text() for path in PAGES}


def test_what_is_made_from_the_code_is_fresh_and_a_stale_page_is_said(tmp_path):
    """In one process, which takes seconds to import all that pages are made from."""
    copy = tmp_path / "docs"
    copy.mkdir()
    (copy / "tools").symlink_to(DOCS / "tools")
    for name in ("api.md", "metrics.md"):
        (copy / name).write_text(TEXT[name].replace("| `n` | integer | 1 |", "| `n` | integer | 2 |"))
    program = f"""import sys, pathlib
sys.path.insert(0, {str(DOCS / "tools")!r})
import pages
sys.argv = ["pages.py", "--check"]
print("status", pages.main())
pages.DOCS = pathlib.Path({str(copy)!r})
sys.exit(pages.main())"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    fresh, _, stale = done.stdout.partition("status 0\n")
    assert done.returncode == 1 and fresh == "" and "stale: api.md;" in stale, done.stdout + done.stderr


def test_every_part_is_on_a_page():
    wanted = set(re.findall(r'^    "([\w-]+)": \w+_part', (DOCS / "tools/pages.py").read_text(), re.M))
    begun = [name for text in TEXT.values() for name in re.findall(r"<!-- made: ([\w-]+) -->", text)]
    ended = [name for text in TEXT.values() for name in re.findall(r"<!-- end: ([\w-]+) -->", text)]
    assert len(wanted) > 10 and sorted(begun) == sorted(ended) == sorted(wanted)


# -------------------------------------------------------------------------------------------------------- nothing is missing
def test_every_flag_says_what_it_does_to_memory_and_speed():
    serve = command_of(_parser(), ["serve"])[0]
    actions = [*serve._actions, *command_parser()._actions]
    names = {next((f for f in a.option_strings if f.startswith("--")), a.dest) for a in actions} - {"--help", "--version"}
    assert names == FLAG_NOTES.keys()
    assert all(name in TEXT["configuration.md"] for name in names - {"model"})


def test_every_flag_says_what_it_is_for():
    rows = re.findall(r"^\| `-.*$", TEXT["configuration.md"], re.M)
    assert len(rows) > 150 and [row for row in rows if not row.split(" | ")[2].strip(" |")] == []


def test_every_field_of_a_body_and_of_an_answer_is_explained():
    rows = re.findall(r"^\| `\w+` \|.*$", TEXT["api.md"].partition("## Fields of bodies")[2], re.M)
    assert len(rows) > 300 and [row for row in rows if not row.rstrip(" |").rpartition(" | ")[2].strip()] == []
    assert all(field.note for field in FIELDS)


def test_notes_are_of_what_there_is():
    """None is left of a field, a route or an error that has gone."""
    text = TEXT["api.md"]
    for struct, fields in FIELDS_OF.items():
        section = text.partition(f"### {struct}\n")[2].partition("\n### ")[0]
        assert section and [name for name in fields if f"| `{name}` |" not in section] == [], struct
    answers = text.partition("## Fields of answers")[2]
    for name in ANSWERS:
        struct, _, field = name.rpartition(".")
        section = answers.partition(f"### {struct}\n")[2].partition("\n### ")[0] if struct else answers
        assert f"| `{field}` |" in section, name
    paths = {f"{route.method} {route.path.replace(':path', '')}" for route in ROUTES.routes}
    assert ROUTE_NOTES.keys() <= paths


def test_every_error_code_is_explained():
    folders = (ROOT / "frontend/http", ROOT / "frontend/media")
    sources = "".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    assert set(re.findall(r'\bcode(?:: str = |=)"([a-z_]+)"', sources)) == ERROR_CODES.keys()


def test_numbers_within_notes_are_those_of_the_code():
    notes = {field.name: field.note for field in FIELDS}
    for name, numbers in {
        "messages": [MAX_ITEMS], "prompt": [MAX_PROMPTS], "n": [MAX_SEQUENCES], "best_of": [BOUNDS["n"][1]],
        "tools": [MAX_TOOLS_BYTES >> 10], "stop": [MAX_STOP_STRINGS, MAX_STOP_LENGTH], "stop_token_ids": [MAX_STOP_TOKEN_IDS],
        "logit_bias": [MAX_LOGIT_BIAS], "bad_words": [MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS], "use_beam_search": [MAX_BEAM_WIDTH],
        "vllm_xargs": [MAX_EXTRA_ARGS, MAX_EXTRA_ARGS_BYTES >> 10],
        "response_format": [MAX_GRAMMAR_BYTES >> 10, MAX_GRAMMAR_DEPTH],
    }.items():  # fmt: skip
        assert all(f"{number:,}" in notes[name] for number in numbers), name


@pytest.mark.parametrize(
    ("kind", "before"), [("flags", ""), ("routes", ""), ("metrics", ""), ("llm", "LLM."), ("commands", "vllm ")]
)
def test_no_name_of_vllms_is_missing(kind, before):
    listed = set(re.findall(r"^\| `([^`]+)` \| (?:same|differs|not here) \|", TEXT["migrating-from-vllm.md"], re.M))
    assert len(VLLM[kind]) > 10 and {before + name for name in VLLM[kind]} - listed == set()


def test_no_field_of_vllms_is_missing():
    for place, names in VLLM["fields"].items():
        section = TEXT["migrating-from-vllm.md"].partition(f"### `{place}`\n")[2].partition("\n###")[0]
        listed = re.findall(r"^\| `(\w+)` \| (?:same|differs|not here) \|", section, re.M)
        assert listed == names or "Not here yet" in section, place


def test_what_is_not_here_says_why():
    rows = re.findall(r"^\| `[^`]+` \| not here \|(.*)\|$", TEXT["migrating-from-vllm.md"], re.M)
    assert len(rows) > 100 and all(row.strip() for row in rows)


# -------------------------------------------------------------------------------------------------------------------- links
def anchors(text: str) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    links = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", path.read_text()))
    for link in links:
        target, _, anchor = link.partition("#")
        if "://" in target:
            continue
        file = (path.parent / target).resolve() if target else path
        assert file.exists(), link
        if anchor:
            assert anchor in anchors(file.read_text()), link


def test_the_log_has_every_section_in_its_table_by_subject():
    text = (ROOT / "benchmarks/LOG.md").read_text()
    listed = re.findall(r"\]\(#([^)]+)\)", text.partition("## By subject\n")[2].partition("\n## ")[0])
    sections = set(re.findall(r"^## (.*)$", text, re.M)) - {"By subject"}
    assert len(listed) == len(set(listed)) and set(listed) == {anchor for title in sections for anchor in anchors(f"# {title}")}


def test_the_readme_leads_to_every_page():
    assert [path.name for path in DOCS.glob("*.md") if f"(docs/{path.name})" not in TEXT["README.md"]] == []


def test_cells_of_the_readmes_tables_are_short():
    """A cell has at most 15 words, names of files not counted; the page that it links to has the rest."""
    cells = [cell for line in TEXT["README.md"].splitlines() if line.startswith("|") for cell in line.strip("|").split(" | ")]
    assert len(cells) > 100
    assert [cell for cell in cells if len(re.sub(r"`[\w/.*]+`,?", "", cell).split()) > 15] == []


def test_files_that_pages_name_exist():
    named = {
        (name, found)
        for name, text in TEXT.items()
        for found in re.findall(r"`((?:deploy|docs|benchmarks|frontend|ipc|kernels)/[\w./-]+)`", text)
    }
    assert len(named) > 20 and sorted(f"{page}: {name}" for page, name in named if not (ROOT / name).exists()) == []

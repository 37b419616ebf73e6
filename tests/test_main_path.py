"""README's list of the files that a chat goes through, held to what three streamed chats execute on a CPU."""

from pathlib import Path

import pytest
from house import ROOT, SOURCES
from main_path import named_files, share, trace_chats

NAMED = named_files((ROOT / "README.md").read_text())
MOST_NAMES, LEAST_SHARE, MOST_FILES = 53, 0.8, 143


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[int]]:
    found = trace_chats(tmp_path_factory.mktemp("lines"))
    if len(found) <= MOST_FILES:
        return found
    # on a busy machine a chat lasts until something is done that is done every few seconds: what two traces share is the chats'
    again = trace_chats(tmp_path_factory.mktemp("again"))
    return {file: both for file, lines in found.items() if (both := lines & again.get(file, set()))}


def test_the_list_is_short_and_names_files_that_are_there():
    assert len(NAMED) == len(set(NAMED)) <= MOST_NAMES
    assert [file for file in NAMED if file not in SOURCES] == []


def test_the_named_files_hold_most_lines_of_a_chat(executed):
    unnamed = sorted((file for file in executed if file not in NAMED), key=lambda file: -len(executed[file]))
    assert share(executed, NAMED) >= LEAST_SHARE, [(file, len(executed[file])) for file in unnamed[:10]]


def test_a_chat_goes_through_few_files(executed):
    assert len(executed) <= MOST_FILES, sorted(executed, key=lambda file: len(executed[file]))


def test_a_named_file_that_no_chat_on_a_cpu_runs_has_a_twin_that_it_runs(executed):
    """A GPU's file stands beside its CPU twin: kernels/step/step_inputs.py and step_inputs_cpu.py, cuda.py and cpu.py."""
    twins = {Path(file).parent for file in executed if Path(file).stem == "cpu" or file.endswith("_cpu.py")}
    assert [file for file in NAMED if file not in executed and Path(file).parent not in twins] == []


def test_lines_are_shared_out_by_file():
    assert share({"a.py": {1, 2, 3}, "b.py": {1}}, ["a.py", "c.py"]) == pytest.approx(0.75)

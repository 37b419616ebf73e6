"""The house's plan, read from the source: which folder may import which, what may stand nowhere, and how much there may be.

The source is parsed, not imported: test_imports.py sees what it does when it runs. `python tests/test_house.py` prints the
figures with their bounds, and the imports between folders.
"""

import ast
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))  # run as a script

from house import (
    BOUNDS,
    EVERYTHING,
    LONG_FILES,
    MOST_LINES_OF_LONG_FILES,
    ROOT,
    SOURCES,
    figures,
    file_arrows,
    folder_arrows,
    function_lines,
    hidden_folders,
    imports,
    long_files,
    mutual_folders,
    nodes,
    odd_beginnings,
    print_arrows,
    print_figures,
    texts_of,
)

MAY_IMPORT = {
    "ipc": set(),
    "kernels": {"ipc.step.sections"},
    "frontend": {"ipc"},
    "enginecore": {"ipc"},
    "workers": {"ipc", "kernels"},
}
MOST_FUNCTION_LINES = 60  # a screen; a Triton kernel is one function, whatever it does
# Decoding is not running: nothing that turns bytes or text into code, and no processes but those of ipc/process/children.py.
FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "multiprocessing", "importlib"}
PACKAGE = "frontend/package"  # is installed as `quire` itself
LOADS_CLASSES = "workers/logits_processors/load.py"  # that the operator names: the one file that may use importlib
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "torch.load", "numpy.load", "np.load", "yaml.load"}


def forbidden_arrows(path: str, source: str) -> list[str]:
    folder = path.split("/")[0]
    wrong = []
    for name in imports(source):
        first, *rest = name.split(".")
        if first == "quire" and not any(rest[: len(to)] == to for to in map(_parts, MAY_IMPORT[folder] | {folder})):
            wrong.append(f"{path}: {folder} may not import {name}")
        elif first == "" or first in {*MAY_IMPORT, "tests", "benchmarks"}:
            wrong.append(f"{path}: import {name!r} by its full name, quire.<folder>.<module>")
        elif first in FORBIDDEN_MODULES and (path, first) != (LOADS_CLASSES, "importlib"):
            wrong.append(f"{path}: {first} has no place here")
    return wrong


def _parts(name: str) -> list[str]:
    return name.split(".")


def forbidden_code(path: str, source: str) -> list[str]:
    wrong = []
    for node in nodes(source):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in FORBIDDEN_CALLS:
            wrong.append(f"{path}:{node.lineno}: {ast.unparse(node.func)}()")
        elif isinstance(node, ast.ExceptHandler) and node.type is None:
            wrong.append(f"{path}:{node.lineno}: bare except")
        elif isinstance(node, ast.keyword) and node.arg == "trust_remote_code" and not _is_false(node.value):
            wrong.append(f"{path}:{node.value.lineno}: trust_remote_code")
    return wrong


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def test_imports_follow_the_table():
    assert [wrong for path, source in SOURCES.items() for wrong in forbidden_arrows(path, source)] == []


def test_nothing_runs_what_it_reads():
    assert [wrong for path, source in SOURCES.items() for wrong in forbidden_code(path, source)] == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("ipc/a.py", "import quire.frontend.client.async_client"),
        ("ipc/a.py", "from quire.kernels.elementwise.norm import rms_norm"),
        ("kernels/a.py", "def f():\n    from quire.ipc import plan"),
        ("kernels/a.py", "from quire.ipc.step.plan import StepPlan"),
        ("kernels/a.py", "from quire.ipc.step import plan"),
        ("frontend/http/a.py", "from quire import enginecore"),
        ("frontend/a.py", "if TYPE_CHECKING:\n    from quire.enginecore.core import Core"),
        ("enginecore/a.py", "import quire.workers.worker as w"),
        ("workers/a.py", "from quire.enginecore.scheduling.sequence import Sequence"),
        ("workers/a.py", "import quire"),
        ("workers/a.py", "from .ops import linear"),
        ("workers/a.py", "from . import ops"),
        ("workers/a.py", "import kernels.norm"),
        ("enginecore/a.py", "from tests.tiny_models import MODELS"),
        ("ipc/a.py", "from pickle import loads"),
        ("ipc/a.py", "import multiprocessing.shared_memory"),
        ("workers/a.py", "import importlib"),
        (LOADS_CLASSES, "import pickle"),
    ],
)
def test_a_forbidden_arrow_is_seen(path, source):
    assert forbidden_arrows(path, source)


@pytest.mark.parametrize("source", ["import quire.ipc.config", "from quire.ipc.messages import Hello", "from quire import ipc"])
@pytest.mark.parametrize("folder", ["frontend", "enginecore", "workers", "ipc"])
def test_an_allowed_arrow_is_let_through(folder, source):
    assert not forbidden_arrows(f"{folder}/a.py", source)


@pytest.mark.parametrize(
    "source",
    [
        "eval(text)",
        "torch.load(path)",
        "np.load(path, allow_pickle=True)",
        "try:\n    f()\nexcept:\n    pass",
        "AutoTokenizer.from_pretrained(folder, trust_remote_code=True)",
    ],
)
def test_forbidden_code_is_seen(source):
    assert forbidden_code("workers/a.py", source)


@pytest.mark.parametrize("source", ["model.eval()", "re.compile(text)", "f(trust_remote_code=False)"])
def test_code_that_only_looks_like_it_is_let_through(source):
    assert not forbidden_code("workers/a.py", source)


def test_interpreted_tests_are_where_make_looks_for_them():
    marked = [path for path, source in EVERYTHING.items() if "mark.interpret" in source and path.startswith("tests/")]
    assert [path for path in marked if not path.startswith(("tests/kernels/", "tests/support/", "tests/test_house.py"))] == []
    assert len(marked) > 5 and "$(or $(PYTEST_ARGS),tests/kernels)" in (ROOT / "Makefile").read_text()


# ----------------------------------------------------------------------------------------------------------- file circles
def circles(sources: dict[str, str]) -> list[list[str]]:
    """Groups of files that each import, through others or not, all of their group."""
    arrows = file_arrows(sources)
    reached: dict[str, set[str]] = {}
    for path in arrows:
        found, todo = set[str](), [path]
        while todo:
            new = arrows[todo.pop()] - found
            found |= new
            todo += new
        reached[path] = found
    groups = {tuple(sorted(q for q in reached[p] if p in reached[q])) for p in arrows if p in reached[p]}
    return sorted(map(list, groups))


def test_no_files_import_each_other():
    assert circles(SOURCES) == []


@pytest.mark.parametrize(
    "back",
    [
        "import quire.ipc.a",
        "from quire.ipc.a import A",
        "from quire.ipc import a",
        "def f():\n    from quire.ipc.a import A",
        "if TYPE_CHECKING:\n    from quire.ipc.a import A",
    ],
)
def test_a_circle_is_seen(back):
    sources = {
        "ipc/a.py": "from quire.ipc.b import B",
        "ipc/b.py": "from quire.ipc import c",
        "ipc/c.py": back,
        "ipc/d.py": "import quire.ipc.a",  # leads into the circle, and is none of it
    }
    assert circles(sources) == [["ipc/a.py", "ipc/b.py", "ipc/c.py"]]
    assert circles({**sources, "ipc/c.py": "import quire.ipc.e"}) == []
    assert circles({"ipc/a.py": "import quire.ipc.a"}) == [["ipc/a.py"]]


def second_hand(sources: dict[str, str]) -> list[str]:
    """Names that are imported from a file which has only imported them, too."""
    froms = {path: [n for n in nodes(source) if isinstance(n, ast.ImportFrom)] for path, source in sources.items()}
    imported = {path: {a.asname or a.name for node in found for a in node.names} for path, found in froms.items()}
    wrong = []
    for path, node in ((path, node) for path, found in froms.items() for node in found):
        home = (node.module or "").removeprefix("quire.").replace(".", "/") + ".py"
        wrong += [f"{path}: {a.name} of {home}" for a in node.names if a.name in imported.get(home, ())]
    return wrong


def test_names_are_imported_from_where_they_are_defined():
    assert second_hand({path: source for path, source in EVERYTHING.items() if not path.startswith(PACKAGE)}) == []
    both = {"ipc/b.py": "from quire.ipc.a import A, B\nB = 1", "ipc/c.py": "from quire.ipc.b import A, C"}
    assert second_hand(both) == ["ipc/c.py: A of ipc/b.py"]


# ------------------------------------------------------------------------------------------------- sizes and arrows
def long_functions(path: str, source: str) -> list[str]:
    functions = [n for n in nodes(source) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    sizes = [(f.name, (f.end_lineno or f.lineno) - f.lineno + 1) for f in functions]
    return [f"{path}: {name} has {size} lines" for name, size in sizes if size > MOST_FUNCTION_LINES]


def test_a_function_fits_a_screen():
    elsewhere = {path: source for path, source in EVERYTHING.items() if not path.startswith("kernels/")}
    assert [long for path, source in elsewhere.items() for long in long_functions(path, source)] == []


def test_arrows_are_drawn_for_every_folder(capsys):
    print_arrows()
    drawn = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if not line.startswith("both ways")}
    assert set(drawn) == {str(Path(path).parent) for path in SOURCES}
    assert "frontend/client" in drawn["frontend/http/api"].split("→")[1]


# ------------------------------------------------------------------------------------------------- figures
@pytest.fixture(scope="module")
def measured() -> dict[str, int]:
    return figures()


@pytest.mark.parametrize("name", BOUNDS)
def test_no_figure_grows(name, measured):
    assert measured[name] <= BOUNDS[name], "python tests/test_house.py prints all figures"


def test_every_figure_has_a_bound(measured, capsys):
    assert measured.keys() == BOUNDS.keys()
    print_figures()
    assert len(capsys.readouterr().out.splitlines()) == len(BOUNDS)


def test_long_files_of_code_are_named_with_a_reason():
    found = long_files(EVERYTHING)
    assert found.keys() == LONG_FILES.keys() and max(found.values()) <= MOST_LINES_OF_LONG_FILES


def test_a_file_of_data_may_be_long_and_one_of_code_may_not():
    data = "ROWS = (\n" + "    1,\n" * 500 + ")\n\n\ndef rows():\n    return ROWS\n"
    code = data + "\n\nclass A:\n" + "".join(f"    def f{n}(self):\n        return {n}\n" for n in range(30))
    nested = "def f():\n    def g():\n        return 1\n    return g\n"
    assert function_lines(data) == 2 and function_lines(code) == 62 and function_lines(nested) == 4
    assert long_files({"data.py": data, "code.py": code, "short.py": nested}) == {"code.py": len(code.splitlines())}


def test_folders_that_import_each_other_are_seen():
    sources = {
        "ipc/a.py": "from quire.ipc.step.b import B",
        "ipc/step/b.py": "from quire.ipc import c",  # a folder inside the other does not count
        "ipc/c.py": "",
        "workers/d.py": "from quire.ipc import a",
        "workers/models/e.py": "from quire.workers.layers.f import F",
        "workers/layers/f.py": "def f():\n    import quire.workers.models.e",
    }
    assert folder_arrows(sources)["workers"] == {"ipc"}
    assert mutual_folders(sources) == [("workers/layers", "workers/models")]


def test_a_folder_behind_a_file_of_its_name_is_seen():
    assert hidden_folders({"ipc/step.py": "", "ipc/step/plan.py": "", "ipc/a.py": ""}) == ["ipc/step.py"]


@pytest.mark.parametrize(
    ("text", "beginnings"),
    [
        ("Who waits is served. It runs.", ["Who waits is served."]),
        ("It runs. Whose turn it is, runs.", ["Whose turn it is, runs."]),
        ("It runs.\n\nOf these, two.", ["Of these, two."]),
        ("- What it has: a list\n- Of others, none", ["What it has: a list - Of others, none", "Of others, none"]),
        ("It runs. What does it do? It runs.", []),
        (
            "The one who waits is served. Those whose turn it is run.",
            ["The one who waits is served.", "Those whose turn it is run."],
        ),
        ("It knows what is due, of whom, and who asks. Whole steps. Often.", []),
    ],
)
def test_odd_beginnings_are_seen(text, beginnings):
    assert odd_beginnings(text) == beginnings


def test_comments_and_strings_are_read():
    source = '"""Of all."""\n# It ends.\n# Who waits?\nx = f("Of a text")  # What is due\ny = "Of"\n'
    assert [len(odd_beginnings(text)) for text in texts_of(source)] == [1, 1, 1, 1]


if __name__ == "__main__":
    print_figures()
    print()
    print_arrows()

"""The house's plan, read from the source: who may import whom, what is nowhere in it, and that its papers agree.

The source is parsed, not imported: what it does when it runs is test_imports.py's business. `python tests/test_house.py` prints
the imports between folders, and how many lines each has.
"""

import ast
import functools
import re
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from quire.frontend.cli.main import main
from quire.ipc.version import VERSION

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "ipc": set(),
    "kernels": {"ipc.step.sections"},
    "frontend": {"ipc"},
    "enginecore": {"ipc"},
    "workers": {"ipc", "kernels"},
}
MOST_LINES = 400  # of a file
MOST_FUNCTION_LINES = 60  # a screen; a Triton kernel is one function, whatever it does
# Decoding is not running: nothing that turns bytes or text into code, and no processes but those of ipc/process/children.py.
FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "multiprocessing", "importlib"}
LOADS_CLASSES = "workers/logits_processors/load.py"  # that the operator names: the one file that may use importlib
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "torch.load", "numpy.load", "np.load", "yaml.load"}
DOCUMENTS = ["README.md", "docs/architecture.md", "benchmarks/README.md"]
PACKAGE = "frontend/package"  # is installed as `quire` itself
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

SOURCES = {str(path.relative_to(ROOT)): path.read_text() for folder in MAY_IMPORT for path in (ROOT / folder).rglob("*.py")}

EVERYTHING = {
    str(path.relative_to(ROOT)): path.read_text()
    for folder in (*MAY_IMPORT, "tests", "benchmarks", "docs")
    for path in sorted((ROOT / folder).rglob("*.py"))
}


@functools.cache
def nodes(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


def imports(source: str) -> list[str]:
    """Full names of what a module imports, wherever in it: `from quire import ipc` is quire.ipc, `from . import x` is `.`."""
    names = []
    for node in nodes(source):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            names += [f"quire.{alias.name}" for alias in node.names] if base == "quire" else [base]
    return names


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
def file_arrows(sources: dict[str, str]) -> dict[str, set[str]]:
    """Which files each file imports, wherever in it: in a function and for type checkers only, too."""
    files = {"quire." + path.removesuffix(".py").replace("/", "."): path for path in sources}
    arrows: dict[str, set[str]] = {}
    for path, source in sources.items():
        names = imports(source)
        for node in nodes(source):
            if isinstance(node, ast.ImportFrom):
                names += [f"{node.module}.{alias.name}" for alias in node.names]
        arrows[path] = {files[name] for name in names if name in files}
    return arrows


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
def test_no_file_is_longer_than_one_reads_at_a_time():
    lengths = {path: len(source.splitlines()) for path, source in EVERYTHING.items()}
    assert {path: n for path, n in lengths.items() if n > MOST_LINES} == {}


def long_functions(path: str, source: str) -> list[str]:
    functions = [n for n in nodes(source) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    sizes = [(f.name, (f.end_lineno or f.lineno) - f.lineno + 1) for f in functions]
    return [f"{path}: {name} has {size} lines" for name, size in sizes if size > MOST_FUNCTION_LINES]


def test_a_function_fits_a_screen():
    elsewhere = {path: source for path, source in EVERYTHING.items() if not path.startswith("kernels/")}
    assert [long for path, source in elsewhere.items() for long in long_functions(path, source)] == []


def arrows() -> dict[str, set[str]]:
    """Which folders the modules of a folder import from, other than their own."""
    found: dict[str, set[str]] = {}
    for path, source in SOURCES.items():
        folder = str(Path(path).parent)
        targets = [Path(*name.split(".")[1:]) for name in imports(source) if name.startswith("quire.")]
        folders = {str(target if (ROOT / target).is_dir() else target.parent) for target in targets}
        found.setdefault(folder, set()).update(folders - {folder})
    return found


def print_arrows() -> None:
    for folder, targets in sorted(arrows().items()):
        lines = sum(len(source.splitlines()) for path, source in SOURCES.items() if str(Path(path).parent) == folder)
        print(f"{folder:28} {lines:6,} lines  → {', '.join(sorted(targets)) or '–'}")


def test_arrows_are_drawn_for_every_folder(capsys):
    print_arrows()
    drawn = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert set(drawn) == {str(Path(path).parent) for path in SOURCES}
    assert "frontend/client" in drawn["frontend/http/api"].split("→")[1]


# ------------------------------------------------------------------------------------------------- papers
def test_every_folder_with_modules_is_a_listed_package():
    setuptools = PYPROJECT["tool"]["setuptools"]
    folders = {str(Path(path).parent) for path in SOURCES}
    folder_of = {"quire/" + folder.removeprefix(PACKAGE).lstrip("/"): folder for folder in folders}
    folder_of = {path.rstrip("/").replace("/", "."): folder for path, folder in folder_of.items()}
    assert sorted(folder_of) == sorted(setuptools["packages"])
    assert setuptools["package-dir"] == folder_of


def test_folders_are_namespaces():
    """A top-level package named `kernels` would hide Hugging Face's, which transformers imports when it is installed."""
    assert [path for path in SOURCES if path.endswith("__init__.py")] == [f"{PACKAGE}/__init__.py"]


def test_type_checkers_find_every_folder():
    links = {link.name: link.resolve() for link in (ROOT / ".types/quire").iterdir()}
    expected = {folder: ROOT / folder for folder in MAY_IMPORT} | {"__init__.py": ROOT / PACKAGE / "__init__.py"}
    assert links == expected


def test_the_version_is_the_same_everywhere():
    assert PYPROJECT["project"]["version"] == VERSION
    assert f"\n## {VERSION}" in (ROOT / "CHANGELOG.md").read_text()


# ------------------------------------------------------------------------------------------------- commands and pins
@pytest.mark.parametrize("document", ["README.md", "docs/architecture.md", "deploy/README.md", "CHANGELOG.md", ".ci/run"])
def test_commands_in_the_documents_exist(document, capsys):
    text = (ROOT / document).read_text()
    if document.endswith(".md"):
        text = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL))
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    for words in re.findall(r"\bmake((?: [a-z-]+)+)", text):
        assert [word for word in words.split() if word not in targets and word[0] != "-"] == []
    for command in set(re.findall(r"(?<![\w./-])(?<!from )quire ([a-z-]+)", text)):
        with pytest.raises(SystemExit, match="0"):
            main([command, "--help"])


def named_files(text: str) -> set[str]:
    """What a document names: `code` that is a path or a pattern of paths, links within the repository, scripts that are run."""
    code = re.findall(r"`([\w./*-]+(?:/|\.(?:py|md|csv|txt|toml)))`", text)
    links = [target for target in re.findall(r"\]\(([^)#]+)", text) if "://" not in target]
    return {*code, *links, *re.findall(r"python ([\w/]+\.py)", text)}


def exists(name: str, beside: Path) -> bool:
    return any(any(folder.glob(name)) for folder in (ROOT, beside)) or (beside / name).resolve().exists()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_documents_name_exist(document):
    names = named_files((ROOT / document).read_text())
    assert len(names) > 10
    assert sorted(name for name in names if not exists(name, (ROOT / document).parent)) == []


def test_a_file_that_is_not_there_is_seen():
    text = (
        "`ipc/config.py`, `ipc/gone.py`, `kernels/`, [x](docs/gone.md#part), python benchmarks/gone.py, `a.b()`, `*/gone_*.py`"
    )
    missing = {name for name in named_files(text) if not exists(name, ROOT)}
    assert missing == {"ipc/gone.py", "docs/gone.md", "benchmarks/gone.py", "*/gone_*.py"}


def test_the_lines_that_the_readme_counts_are_about_right():
    """Of the whole tree and of the files that a request passes."""
    text = (ROOT / "README.md").read_text()
    stated = re.search(r"Quire has ([\d,]+) lines.*?these (\d+) files of together\s+([\d,]+)", text, re.DOTALL)
    tree, num_files, way = (int(group.replace(",", "")) for group in stated.groups())
    table = text[stated.end() : text.index("### Where to change what")]
    files = re.findall(r"`([^`]+)`", table)
    assert len(files) == num_files == len(set(files))
    assert tree == pytest.approx(sum(len(source.splitlines()) for source in SOURCES.values()), rel=0.05)
    assert way == pytest.approx(sum(len(SOURCES[file].splitlines()) for file in files), rel=0.05)


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    found = {}
    for line in lines:
        requirement = Requirement(line)
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", f"{line} is not a pin"
        assert "+" not in specifier.version, f"{line} names one build of it: not every index has that"
        assert requirement.url is None
        found[canonicalize_name(requirement.name)] = specifier.version
    return found


def test_every_requirement_is_pinned_within_its_range():
    project = PYPROJECT["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values(), PYPROJECT["build-system"]["requires"]]
    for requirement in (Requirement(line) for lines in lists for line in lines):
        pin = pins().get(canonicalize_name(requirement.name), "none")
        assert pin != "none" and requirement.specifier.contains(pin), f"{requirement} is pinned to {pin}"


def test_the_installation_is_what_is_pinned_and_has_no_more():
    """Everything that was installed for quire[test], whatever asked for it, is pinned: tomorrow's installation is today's."""
    project = PYPROJECT["project"]
    queue = [Requirement(line) for line in [*project["dependencies"], *project["optional-dependencies"]["test"]]]
    seen = set()
    for requirement in queue:
        name = canonicalize_name(requirement.name)
        if (name, *requirement.extras) in seen:
            continue
        seen.add((name, *requirement.extras))
        for need in map(Requirement, distribution(name).requires or []):
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in ("", *requirement.extras)):
                queue.append(need)
    # PyTorch's CUDA build has libraries besides, whose versions it fixes itself.
    assert {name for name, *_ in seen if not name.startswith(("nvidia-", "cuda-"))} <= set(pins())


if __name__ == "__main__":
    print_arrows()

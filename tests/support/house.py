"""The project's source as text and syntax trees, and the figures that tests/test_house.py holds it to.

The source is parsed, not imported. `figures()` measures, and BOUNDS says what each figure may be at most;
`python tests/test_house.py` prints both. Tests, benchmarks/LOG.md and CHANGELOG.md are left out of the figures on prose.
"""

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("ipc", "kernels", "frontend", "enginecore", "workers")
SOURCES = {str(path.relative_to(ROOT)): path.read_text() for room in ROOMS for path in (ROOT / room).rglob("*.py")}
EVERYTHING = {
    str(path.relative_to(ROOT)): path.read_text()
    for room in (*ROOMS, "tests", "benchmarks", "docs")
    for path in sorted((ROOT / room).rglob("*.py"))
}
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in sorted(
        (*ROOT.glob("*.md"), *(p for room in ("docs", "benchmarks", "deploy") for p in (ROOT / room).rglob("*.md")))
    )
    if path.name not in ("LOG.md", "CHANGELOG.md")
}

MOST_LINES = 400  # of a file of code
MOST_LINES_OF_LONG_FILES = 600
# Files of code that are longer than 400 lines, each with the reason; at most five.
LONG_FILES = {
    "frontend/replicas/replicas.py": "each call of a client, for one of several engines or for all",
    "ipc/config.py": "a line for each flag of an engine, and its check",
    "ipc/links/core_to_frontends.py": "one socket, and what may be held for each frontend",
    "workers/worker.py": "the worker's life in order; its parts are files of their own",
    "kernels/linear/scaled_wide.py": "one kernel and the choice of its tiles, which explain each other",
}
MOST_FUNCTION_LINES_OF_DATA = 40  # all functions of a file of data together

BOUNDS = {
    "sentences that begin with Who, Whose, What or Of": 40,
    "lines that say nobody": 15,
    "lines of the engine": 125_000,
    "lines of enginecore/core.py": 395,
    "lines of enginecore/scheduling/scheduler.py": 284,
    "lines of workers/runner.py": 205,
    "files in frontend/http/api itself": 32,
    "pairs of folders that import each other": 13,
    "such pairs in kernels/": 0,
    "folders with the name of a file beside them": 0,
    "files of code over 400 lines": 5,
    "files that name the sampling value min_p": 6,
    "files that name the flag kv_cache_memory_bytes": 4,
    "lines that ruff does not format": 720,
    "private names that tests reach for": 645,
    "calls of monkeypatch.setattr in tests": 378,
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


def file_arrows(sources: dict[str, str]) -> dict[str, set[str]]:
    """The files that each file imports, wherever in it: in a function and for type checkers only, too."""
    files = {"quire." + path.removesuffix(".py").replace("/", "."): path for path in sources}
    arrows: dict[str, set[str]] = {}
    for path, source in sources.items():
        names = imports(source)
        for node in nodes(source):
            if isinstance(node, ast.ImportFrom):
                names += [f"{node.module}.{alias.name}" for alias in node.names]
        arrows[path] = {files[name] for name in names if name in files}
    return arrows


def folder_arrows(sources: dict[str, str]) -> dict[str, set[str]]:
    """The other folders that the modules of each folder import from."""
    found: dict[str, set[str]] = {}
    for path, targets in file_arrows(sources).items():
        folder = str(Path(path).parent)
        found.setdefault(folder, set()).update({str(Path(target).parent) for target in targets} - {folder})
    return found


def mutual_folders(sources: dict[str, str]) -> list[tuple[str, str]]:
    """Pairs of folders that import each other; a folder and one inside it do not count."""
    arrows = folder_arrows(sources)
    pairs = {tuple(sorted((a, b))) for a in arrows for b in arrows[a] if a in arrows.get(b, ())}
    return sorted((a, b) for a, b in pairs if not b.startswith(a + "/"))


def hidden_folders(sources: dict[str, str]) -> list[str]:
    """Folders beside a file of their name: there are no `__init__.py`, so the file would hide the folder."""
    folders = {str(parent) for path in sources for parent in Path(path).parents}
    return sorted(path for path in sources if path.removesuffix(".py") in folders)


def function_lines(source: str) -> int:
    """Lines of all outermost functions and methods together."""
    inner = {
        id(below)
        for node in nodes(source)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for below in ast.walk(node)
        if below is not node
    }
    outer = [n for n in nodes(source) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and id(n) not in inner]
    return sum((n.end_lineno or n.lineno) - n.lineno + 1 for n in outer)


def long_files(sources: dict[str, str]) -> dict[str, int]:
    """Files of more than 400 lines that are code: a file of data has hardly any functions."""
    lengths = {path: len(source.splitlines()) for path, source in sources.items()}
    return {
        path: n for path, n in lengths.items() if n > MOST_LINES and function_lines(sources[path]) > MOST_FUNCTION_LINES_OF_DATA
    }


# ------------------------------------------------------------------------------------------------------------- prose
# Behind the end of a sentence, or at the beginning of a paragraph, a list's item or a table's cell.
_BEGINNING = re.compile(
    r"(?:^|(?<=[.!?:])\s+|(?<=[.!?][)\"'`])\s+|\n\s*\n\s*|\n?\s*[-*|]\s+)"
    r"(Who|Whose|What|Of|Whoever|Whatever|The ones? who|That which|Those (?:who|whose)|[Hh]e who)\b"
)


def odd_beginnings(text: str) -> list[str]:
    """Sentences that begin with Who, Whose, What or Of, or with a way around them. A question may begin with What."""
    found = []
    for match in _BEGINNING.finditer(text):
        sentence = re.split(r"(?<=[.!?])\s", text[match.start(1) :], maxsplit=1)[0]
        if not (match[1] == "What" and sentence.rstrip().endswith("?")):
            found.append(" ".join(sentence.split()))
    return found


def comments(source: str) -> Iterator[str]:
    """Comments, those on lines that follow each other as one."""
    run: list[str] = []
    last = -1
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            whole_line = lines[token.start[0] - 1].lstrip().startswith("#")
            if run and not (whole_line and token.start[0] == last + 1):
                yield " ".join(run)
                run = []
            run.append(token.string.lstrip("#: "))
            last = token.start[0] if whole_line else -1
    if run:
        yield " ".join(run)


def texts_of(source: str) -> list[str]:
    """What a module says: its comments and its strings of several words, docstrings among them."""
    strings = [node.value for node in nodes(source) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [*comments(source), *(text for text in strings if " " in text.strip())]


def prose() -> dict[str, list[str]]:
    """The texts of each file that has to read well, by path."""
    found = {path: texts_of(source) for path, source in EVERYTHING.items() if not path.startswith("tests/")}
    for path, page in PAGES.items():
        found[path] = [re.sub(r"```.*?```", "", page, flags=re.DOTALL)]
    return found


# ------------------------------------------------------------------------------------------------------------- figures
def private_names(sources: dict[str, str]) -> int:
    """Places where tests read or set a private name of an object that is not their own."""
    own = {"_replace", "_asdict", "_fields", "_make"}  # of named tuples, and public
    return sum(
        isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in own
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        for source in sources.values()
        for node in nodes(source)
    )


def _naming(word: str) -> int:
    return sum(bool(re.search(rf"\b{word}\b", source)) for source in SOURCES.values())


def _lines(path: str) -> int:
    return len(SOURCES[path].splitlines())


@functools.cache
def figures() -> dict[str, int]:
    """Every figure of BOUNDS, measured."""
    pairs = mutual_folders(SOURCES)
    tests = {path: source for path, source in EVERYTHING.items() if path.startswith("tests/")}
    said = [source for path, source in EVERYTHING.items() if path not in tests] + list(PAGES.values())
    return {
        "sentences that begin with Who, Whose, What or Of": sum(
            len(odd_beginnings(text)) for texts in prose().values() for text in texts
        ),
        "lines that say nobody": sum(
            bool(re.search(r"\bnobody\b", line, re.IGNORECASE)) for text in said for line in text.splitlines()
        ),
        "lines of the engine": sum(map(_lines, SOURCES)),
        "lines of enginecore/core.py": _lines("enginecore/core.py"),
        "lines of enginecore/scheduling/scheduler.py": _lines("enginecore/scheduling/scheduler.py"),
        "lines of workers/runner.py": _lines("workers/runner.py"),
        "files in frontend/http/api itself": sum(str(Path(path).parent) == "frontend/http/api" for path in SOURCES),
        "pairs of folders that import each other": len(pairs),
        "such pairs in kernels/": sum(a.startswith("kernels") for a, _ in pairs),
        "folders with the name of a file beside them": len(hidden_folders(SOURCES)),
        "files of code over 400 lines": len(long_files(EVERYTHING)),
        "files that name the sampling value min_p": _naming("min_p"),
        "files that name the flag kv_cache_memory_bytes": _naming("kv[_-]cache[_-]memory[_-]bytes"),
        "lines that ruff does not format": sum(source.count("fmt: " + "skip") for source in EVERYTHING.values()),
        "private names that tests reach for": private_names(tests),
        "calls of monkeypatch.setattr in tests": sum(source.count("monkeypatch." + "setattr(") for source in tests.values()),
    }


def print_figures() -> None:
    for name, value in figures().items():
        mark = "" if value <= BOUNDS[name] else "   <- too many"
        print(f"{name:52} {value:7,}  at most {BOUNDS[name]:7,}{mark}")


def print_arrows() -> None:
    """The folders with their lines and what they import from; pairs that import each other."""
    for folder, targets in sorted(folder_arrows(SOURCES).items()):
        lines = sum(_lines(path) for path in SOURCES if str(Path(path).parent) == folder)
        print(f"{folder:28} {lines:6,} lines  → {', '.join(sorted(targets)) or '–'}")
    for a, b in mutual_folders(SOURCES):
        print(f"both ways: {a} and {b}")

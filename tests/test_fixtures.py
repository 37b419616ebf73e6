"""Every fixture that a test names is there, of tests that need a GPU too: they are collected here, and run elsewhere."""

import ast
import functools
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
BUILT_IN = {
    "cache", "capfd", "capfdbinary", "caplog", "capsys", "capsysbinary", "monkeypatch", "pytestconfig", "record_property",
    "recwarn", "request", "self", "subtests", "tmp_path", "tmp_path_factory", "worker_id",
}  # fmt: skip


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def functions(path: Path) -> list[ast.FunctionDef]:
    return [node for node in nodes(path) if isinstance(node, ast.FunctionDef)]


@functools.cache
def fixtures(path: Path) -> set[str]:
    """Names of the fixtures that a file defines, or imports."""
    made = {f.name for f in functions(path) if any("fixture" in ast.unparse(d) for d in f.decorator_list)}
    return made | {alias.asname or alias.name for n in nodes(path) if isinstance(n, ast.ImportFrom) for alias in n.names}


def given_by_decorators(function: ast.FunctionDef, source: str) -> set[str]:
    """Arguments of parametrize, whose names may stand in a constant, and of hypothesis's given."""
    names: set[str] = set()
    for decorator in function.decorator_list:
        if not isinstance(decorator, ast.Call):
            if isinstance(decorator, ast.Name):  # a decorator of the file's own, made of parametrize
                names |= words(source)
            continue
        names |= {keyword.arg for keyword in decorator.keywords if keyword.arg}
        kind = ast.unparse(decorator.func)
        if kind.endswith("parametrize"):
            names |= words(ast.unparse(decorator.args[0]))
        elif kind.endswith("given") and decorator.args:
            some = slice(None) if isinstance(decorator.args[0], ast.Starred) else slice(-len(decorator.args), None)
            names |= {argument.arg for argument in function.args.args[some]}
    return names


def words(text: str) -> set[str]:
    return set("".join(c if c.isalnum() or c == "_" else " " for c in text).split())


@pytest.mark.parametrize("path", sorted(TESTS.rglob("test_*.py")), ids=lambda path: str(path.relative_to(TESTS)))
def test_every_fixture_is_there(path):
    source, known = path.read_text(), BUILT_IN | fixtures(path)
    for folder in (path.parent, *path.parent.parents):
        if (folder / "conftest.py").exists():
            known |= fixtures(folder / "conftest.py")
        if folder == TESTS:
            break
    missing = {}
    for function in functions(path):
        if function.name.startswith("test_"):
            left = {a.arg for a in function.args.args} - known - given_by_decorators(function, source)
            if left - {a.arg for a in function.args.args[len(function.args.args) - len(function.args.defaults) :]}:
                missing[function.name] = left
    assert missing == {}

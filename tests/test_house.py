"""The house's plan, read from the source: who may import whom, what is nowhere in it, and that its papers agree.

Nothing is imported here but the standard library and `packaging`: the source is parsed, so a faulty module is still judged.
"""

import ast
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from quire.frontend.cli import _parser
from quire.ipc.version import VERSION

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "ipc": set(),
    "kernels": set(),
    "frontend": {"ipc"},
    "enginecore": {"ipc"},
    "workers": {"ipc", "kernels"},
}
# Decoding is not running: nothing that turns bytes or text into code, and no processes but those of ipc/process.py.
FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "multiprocessing", "importlib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "torch.load", "numpy.load", "np.load", "yaml.load"}
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

SOURCES = {str(path.relative_to(ROOT)): path.read_text() for folder in MAY_IMPORT for path in (ROOT / folder).rglob("*.py")}


def imports(source: str) -> list[str]:
    """Full names of what a module imports, wherever in it: `from quire import ipc` is quire.ipc, `from . import x` is `.`."""
    names = []
    for node in ast.walk(ast.parse(source)):
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
        if first == "quire" and not (rest and rest[0] in MAY_IMPORT[folder] | {folder}):
            wrong.append(f"{path}: {folder} may not import {name}")
        elif first == "" or first in {*MAY_IMPORT, "tests", "benchmarks"}:
            wrong.append(f"{path}: import {name!r} by its full name, quire.<folder>.<module>")
        elif first in FORBIDDEN_MODULES:
            wrong.append(f"{path}: {first} has no place here")
    return wrong


def forbidden_code(path: str, source: str) -> list[str]:
    wrong = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in FORBIDDEN_CALLS:
            wrong.append(f"{path}:{node.lineno}: {ast.unparse(node.func)}()")
        elif isinstance(node, ast.ExceptHandler) and node.type is None:
            wrong.append(f"{path}:{node.lineno}: bare except")
        elif isinstance(node, ast.keyword) and node.arg == "trust_remote_code" and not _is_false(node.value):
            wrong.append(f"{path}:{node.value.lineno}: trust_remote_code")
    return wrong


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


@pytest.mark.parametrize("path", SOURCES)
def test_imports_follow_the_table(path):
    assert not forbidden_arrows(path, SOURCES[path])


@pytest.mark.parametrize("path", SOURCES)
def test_nothing_runs_what_it_reads(path):
    assert not forbidden_code(path, SOURCES[path])


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("ipc/a.py", "import quire.frontend.client"),
        ("ipc/a.py", "from quire.kernels.norm import rms_norm"),
        ("kernels/a.py", "def f():\n    from quire.ipc import plan"),
        ("frontend/http/a.py", "from quire import enginecore"),
        ("frontend/a.py", "if TYPE_CHECKING:\n    from quire.enginecore.core import Core"),
        ("enginecore/a.py", "import quire.workers.worker as w"),
        ("workers/a.py", "from quire.enginecore.sequence import Sequence"),
        ("workers/a.py", "import quire"),
        ("workers/a.py", "from .ops import linear"),
        ("workers/a.py", "from . import ops"),
        ("workers/a.py", "import kernels.norm"),
        ("enginecore/a.py", "from tests.tiny_models import MODELS"),
        ("ipc/a.py", "from pickle import loads"),
        ("ipc/a.py", "import multiprocessing.shared_memory"),
    ],
)
def test_a_forbidden_arrow_is_seen(path, source):
    assert forbidden_arrows(path, source)


@pytest.mark.parametrize("source", ["import quire.ipc.plan", "from quire.ipc.messages import Hello", "from quire import ipc"])
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


def test_every_folder_with_modules_is_a_listed_package():
    setuptools = PYPROJECT["tool"]["setuptools"]
    on_disk = {f"quire.{Path(path).parent}".replace("/", ".") for path in SOURCES}
    assert sorted(on_disk) == sorted(setuptools["packages"])
    assert setuptools["package-dir"] == {name: name.removeprefix("quire.").replace(".", "/") for name in setuptools["packages"]}


def test_folders_are_namespaces():
    """A top-level package named `kernels` would hide Hugging Face's, which transformers imports when it is installed."""
    assert [path for path in SOURCES if path.endswith("__init__.py")] == []


def test_type_checkers_find_every_folder():
    links = {link.name: link.resolve() for link in (ROOT / ".types/quire").iterdir()}
    assert links == {folder: ROOT / folder for folder in MAY_IMPORT}


def test_the_version_is_the_same_everywhere():
    assert PYPROJECT["project"]["version"] == VERSION
    assert f"\n## {VERSION}" in (ROOT / "CHANGELOG.md").read_text()


# ------------------------------------------------------------------------------------------------- commands and pins
def test_commands_in_the_documents_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = "\n".join((ROOT / name).read_text() for name in ("README.md", "CHANGELOG.md", ".ci/run"))
    made = {word for line in re.findall(r"(?<![\w-])make ((?:--?[\w-]+ )*[a-z]+(?: [a-z]+)*)", _code(text)) for word in line.split()}
    assert {word for word in made if not word.startswith("-")} <= targets
    commands = next(action.choices for action in _parser()._actions if action.dest == "command")
    assert set(re.findall(r"(?<![\w./-])quire ([a-z]+)", _code(text))) <= set(commands)


def _code(text: str) -> str:
    """What is between backticks, single or fenced, and lines of a script."""
    return "\n".join(re.findall(r"```.*?```|`[^`\n]+`|^exec .*$|^    .*$", text, re.MULTILINE | re.DOTALL))


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
    required = [*project["dependencies"], *sum(project["optional-dependencies"].values(), [])]
    for requirement in map(Requirement, [*required, *PYPROJECT["build-system"]["requires"]]):
        pin = pins().get(canonicalize_name(requirement.name))
        assert pin is not None, f"constraints.txt does not pin {requirement.name}"
        assert requirement.specifier.contains(pin), f"constraints.txt has {requirement.name} {pin}, pyproject.toml {requirement}"


def test_the_installation_is_what_is_pinned_and_has_no_more():
    """Everything that was installed for quire[test], whatever asked for it, is pinned: tomorrow's installation is today's."""
    from importlib.metadata import distribution

    pinned, seen, queue = pins(), set(), [Requirement("quire[test]")]
    while queue:
        requirement = queue.pop()
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        found = distribution(requirement.name)
        for need in map(Requirement, found.requires or []):
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in [*requirement.extras, ""]):
                queue.append(need)
    names = {name for name, _ in seen} - {"quire"}
    # PyTorch's CUDA build brings its own, at versions it pins itself
    unpinned = {name for name in names if not name.startswith(("nvidia-", "cuda-"))} - set(pinned)
    assert not unpinned

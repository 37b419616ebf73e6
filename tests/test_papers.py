"""The project's papers agree with the source: packages, commands, files that documents name, lines that README counts, pins."""

import re
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
from house import ROOT, SOURCES
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from quire.frontend.cli.main import main
from quire.ipc.version import VERSION

DOCUMENTS = ["README.md", "CONTRIBUTING.md", "docs/architecture.md", "benchmarks/README.md"]
PACKAGE = "frontend/package"  # is installed as `quire` itself
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ROOMS = ("ipc", "kernels", "frontend", "enginecore", "workers")


def test_every_folder_with_modules_is_a_listed_package():
    setuptools = PYPROJECT["tool"]["setuptools"]
    folders = {str(Path(path).parent) for path in SOURCES}
    folder_of = {"quire/" + folder.removeprefix(PACKAGE).lstrip("/"): folder for folder in folders}
    folder_of = {path.rstrip("/").replace("/", "."): folder for path, folder in folder_of.items()}
    assert sorted(folder_of) == sorted(setuptools["packages"])
    assert setuptools["package-dir"] == folder_of


def test_folders_are_namespaces():
    """A top-level package named `kernels` would hide Hugging Face's, which transformers imports when it is installed."""
    found = {path for path in SOURCES if path.endswith("__init__.py")}
    # below the package `quire` itself, names of vLLM's packages: nothing of ours is imported by them
    assert found == {f"{PACKAGE}/{folder}__init__.py" for folder in ("", "distributed/", "utils/")}


def test_type_checkers_find_every_folder():
    links = {link.name: link.resolve() for link in (ROOT / ".types/quire").iterdir()}
    expected = {folder: ROOT / folder for folder in ROOMS} | {"__init__.py": ROOT / PACKAGE / "__init__.py"}
    assert links == expected


def test_the_version_is_the_same_everywhere():
    assert PYPROJECT["project"]["version"] == VERSION
    assert f"\n## {VERSION}" in (ROOT / "CHANGELOG.md").read_text()


# ------------------------------------------------------------------------------------------------- commands and pins
@pytest.mark.parametrize(
    "document", ["README.md", "CONTRIBUTING.md", "docs/architecture.md", "deploy/README.md", "CHANGELOG.md", ".ci/run"]
)
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

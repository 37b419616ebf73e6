"""What is installed: a wheel, built from the source archive, holds every module and data file and runs with no checkout near.

The environments are new ones that see this one's packages after their own, through a .pth file: nothing is downloaded, and an
editable installation of Quire here, which is a .pth file itself, does not count there. The source is a copy: a build leaves
files behind. Hugging Face's `kernels` is played by a package of that name with a module of ours' name in it.
"""

import json
import shutil
import subprocess
import sys
import urllib.request
import zipfile
from pathlib import Path

import pytest

from quire.ipc.version import VERSION

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
FOLDERS = ("frontend", "enginecore", "workers", "kernels", "ipc")
IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc")


class Environment:
    """A virtual environment of its own, with this one's packages behind it."""

    def __init__(self, folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        self.folder = folder
        self.python = folder / "bin" / "python"
        (site_packages,) = folder.glob("lib/python3.*/site-packages")
        outer = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
        (site_packages / "outer.pth").write_text("\n".join(outer) + "\n")

    def install(self, *arguments: object) -> None:
        pip = [sys.executable, "-m", "pip", "--python", self.python, "--disable-pip-version-check", "--quiet"]
        ours = ["install", "--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed"]
        run([*pip, *ours, *arguments], cwd=self.folder)

    def run(self, *command: object, cwd: Path | None = None) -> str:
        """Output of a program of this environment: `python` or a console script."""
        name, *arguments = command
        return run([self.folder / "bin" / str(name), *arguments], cwd=cwd or self.folder)


def run(command: list[object], cwd: Path) -> str:
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=IGNORED)
    for name in ("pyproject.toml", "README.md", "LICENSE", "Makefile", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from an sdist, so a file that the sdist lacks is lacking here as well."""
    folder = tmp_path_factory.mktemp("dist")
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source], cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    environment = Environment(tmp_path_factory.mktemp("installed") / "venv")
    environment.install(wheel)
    return environment


@pytest.fixture(scope="module")
def editable(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    environment = Environment(tmp_path_factory.mktemp("editable") / "venv")
    environment.install("--editable", source)
    return environment


def test_the_wheel_holds_every_file_of_the_folders_and_nothing_else(source, wheel):
    files = {f"quire/{path.relative_to(ROOT)}" for name in FOLDERS for path in (ROOT / name).rglob("*") if path.is_file()}
    expected = {name.replace("frontend/package/", "") for name in files if "__pycache__" not in name}
    held = set(zipfile.ZipFile(wheel).namelist())
    info = {name for name in held if name.startswith(f"quire-{VERSION}.dist-info/")}
    assert held - info == expected
    assert f"quire-{VERSION}.dist-info/licenses/LICENSE" in info
    assert "quire/enginecore/loading/bundled/model.safetensors" in held
    assert "quire/enginecore/loading/bundled_embedder/1_Pooling/config.json" in held


IMPORT_ALL = """
import importlib, json, sys
print(json.dumps({name: importlib.import_module(name).__file__ for name in sys.argv[1:]}))
"""


def test_every_module_of_the_wheel_can_be_imported(wheel, installed):
    paths = [Path(name) for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")]
    names = [".".join((path.parent if path.stem == "__init__" else path.with_suffix("")).parts) for path in paths]
    files = json.loads(installed.run("python", "-P", "-W", "error", "-c", IMPORT_ALL, *names))
    assert len(names) > 100
    assert [file for file in files.values() if not Path(file).is_relative_to(installed.folder)] == []


@pytest.mark.parametrize("kind", ["installed", "editable"])
def test_users_import_from_the_package_itself(kind, source, request):
    environment = request.getfixturevalue(kind)
    code = """if True:
        import quire, sys
        from quire import LLM, AsyncClient, SamplingParams
        assert "torch" not in sys.modules
        print(quire.__version__, quire.__file__)
    """
    version, file = environment.run("python", "-P", "-W", "error", "-c", code).split()
    home = environment.folder if kind == "installed" else source
    assert version == VERSION and Path(file).is_relative_to(home)


@pytest.mark.parametrize("kind", ["installed", "editable"])
@pytest.mark.parametrize("module", ["quire.workers", "quire.enginecore", "quire.frontend.cli.main"])
def test_processes_find_their_modules(kind, module, request):
    """As the launcher starts them: by name, with the working directory not on the path."""
    code = f"from importlib.util import find_spec; print(find_spec('{module}').name)"
    assert request.getfixturevalue(kind).run("python", "-P", "-W", "error", "-c", code) == f"{module}\n"


def test_console_scripts_run(installed):
    assert installed.run("quire", "version") == f"quire {VERSION}\n"
    assert installed.run("quire", "--help").startswith("usage: quire")
    assert installed.run("enginecore", "--help").startswith("usage: enginecore")


def test_the_installation_generates_text_with_its_bundled_model(installed):
    code = """if True:
        from quire import LLM, SamplingParams
        with LLM(device="cpu", max_model_len=64) as llm:
            (output,) = llm.generate("Once", SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
            print(len(output.outputs[0].token_ids))
    """
    assert installed.run("python", "-P", "-W", "error", "-c", code) == "8\n"


def test_make_wheel_builds_what_serves_in_an_empty_environment(source, wheel, tmp_path):
    (source / "build" / "lib" / "quire").mkdir(parents=True, exist_ok=True)
    (source / "build" / "lib" / "quire" / "stale.py").touch()  # left by a build before the file was removed
    make = ["make", "-C", source, f"VENV={sys.prefix}", "--assume-old", f"{sys.prefix}/.installed-run", "wheel"]
    said = run(make, cwd=tmp_path)
    (built,) = (source / "dist").glob("*.whl")
    assert f"pip install '{built}'" in said
    names = set(zipfile.ZipFile(built).namelist())
    assert names == set(zipfile.ZipFile(wheel).namelist()) and "quire/py.typed" in names
    environment = Environment(tmp_path / "venv")
    environment.install(built)
    command = [environment.folder / "bin" / "quire", "serve", "--port", "0", "--max-model-len", "128"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as server:
        try:
            url = server.stdout.readline().rpartition(" at ")[2].strip()
            with urllib.request.urlopen(f"{url}/", timeout=120) as page:
                assert b"<html" in page.read()
            body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request, timeout=120) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] > 0
        finally:
            server.terminate()
            server.stdout.read()
    assert server.returncode == 0


# ------------------------------------------------------------------------------------------- Hugging Face's `kernels`
@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of a top-level package named `kernels`, which like ours has a module `norm`."""
    path = tmp_path_factory.mktemp("stand_in") / "kernels-99.0-py3-none-any.whl"
    info = "kernels-99.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("kernels/__init__.py", "from kernels.norm import get_kernel\n")
        archive.writestr("kernels/norm.py", "def get_kernel(): return 'theirs'\n")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: kernels\nVersion: 99.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.mark.parametrize("kind", ["installed", "editable"])
def test_another_package_named_kernels_lives_beside_us(kind, stand_in, source, request):
    environment = request.getfixturevalue(kind)
    environment.install(stand_in)
    check = """if True:
        import kernels, kernels.norm
        from importlib.util import find_spec
        assert kernels.get_kernel() == kernels.norm.get_kernel() == "theirs"
        print(find_spec("quire.kernels.elementwise.norm").origin)
    """
    home = environment.folder if kind == "installed" else source
    here = environment.run("python", "-P", "-W", "error", "-c", f"import kernels.norm\n{check}")
    # In the checkout and without -P our folder is found first: a folder without __init__.py gives way to a package.
    there = environment.run("python", "-W", "error", "-c", f"import quire.kernels\n{check}", cwd=source)
    assert Path(here.strip()).is_relative_to(home)
    assert Path(there.strip()).is_relative_to(home)

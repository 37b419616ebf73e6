"""instructor, in an environment of its own: it wants older versions of what the other packages' tests have.

pip installs it there, as `make` installs the others. The requests that it sends are in recorded/instructor.json, too.
"""

import json
import subprocess
import venv
from pathlib import Path

import pytest
from client_packages import Server, is_person

pytestmark = pytest.mark.slow

CHILD = Path(__file__).parents[1] / "support" / "instructor_child.py"


def test_every_mode_that_the_server_enforces(server: Server, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    installed = subprocess.run([python, "-m", "pip", "install", "--quiet", "instructor>=1.15"], capture_output=True, text=True)
    assert installed.returncode == 0, installed.stderr
    done = subprocess.run([python, str(CHILD), server.base_url, server.key], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    people = json.loads(done.stdout.splitlines()[-1])
    assert set(people) == {"TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"} and all(is_person(json.dumps(p)) for p in people.values())

"""schemathesis over /openapi.json of a server that runs: no fault of the server, no hang, no answer that is not as described.

A few dozen cases here, 10,000 in the slow run, each with a seed. tests/frontend/http/test_openapi.py sends some without a
server, with an engine that says what it is told.
"""

from pathlib import Path

import pytest
from client_packages import Server
from schemathesis_run import run


@pytest.mark.slow
def test_a_few_cases(server: Server, tmp_path: Path) -> None:
    code, number, output = run(server.url, 1, 1, str(tmp_path), server.key, phases="examples,fuzzing")
    assert code == 0 and number >= 40, output


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3])
def test_five_thousand_cases(server: Server, tmp_path: Path, seed: int) -> None:
    """Twice that, with the two seeds."""
    code, number, output = run(server.url, seed, 150, str(tmp_path), server.key)
    assert code == 0 and number >= 5000, output
    assert server.ask("GET", "/health").status == 200

"""deploy/ by the judgement of the programs that it is for: hadolint, promtool, systemd-analyze, Kubernetes' own schemas."""

import subprocess
import sys
from pathlib import Path

import pytest
from balancers import program, replaced
from deployed import DEPLOY, UNITS, kubernetes, read

pytestmark = pytest.mark.deploy

NOT_OF_KUBERNETES = {"monitoring.coreos.com/v1"}  # the Prometheus operator's
KUBERNETES_VERSIONS = ("1.29", "1.32")


def run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_hadolint_has_nothing_to_say() -> None:
    assert run(program("hadolint"), str(DEPLOY / "docker/Dockerfile")) == ""


def test_promtool_takes_the_configuration_and_the_rules(tmp_path: Path) -> None:
    (tmp_path / "prometheus.yaml").write_text(
        replaced(read("prometheus/prometheus.yaml"), ("/etc/prometheus/alerts.yaml", str(DEPLOY / "prometheus/alerts.yaml")))
    )
    said = run(program("promtool"), "check", "config", str(tmp_path / "prometheus.yaml"))
    assert said.count("SUCCESS") == 3 and "rules found" in said


def test_systemd_takes_the_units(tmp_path: Path) -> None:
    programs = {name: Path(sys.prefix) / "bin" / name for name in ("quire", "enginecore")}
    for name in UNITS:
        text = read(f"systemd/{name}")
        for each, path in programs.items():
            text = text.replace(f"/opt/quire/bin/{each} ", f"{path} ")
        (tmp_path / name).write_text(text)
    names = [f"./{name.replace('@', '@8001')}" for name in UNITS]
    assert run(program("systemd-analyze"), "verify", *names, cwd=tmp_path) == ""
    for name in UNITS:  # 10: everything is open
        run(program("systemd-analyze"), "security", "--offline=yes", "--threshold=20", f"./{name}", cwd=tmp_path)


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_kubernetes_takes_the_objects(version: str) -> None:
    import kubernetes_validate

    judged = [each for each in kubernetes() if each["apiVersion"] not in NOT_OF_KUBERNETES]
    assert len(judged) > 5
    for each in judged:
        assert kubernetes_validate.validate(each, version, strict=True)

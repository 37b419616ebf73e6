"""Reads deploy/: its YAML, its systemd units, its Dockerfile, and each of our command lines in them."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = ("quire.yaml", "autoscaling.yaml", "monitoring.yaml")


class Command(NamedTuple):
    """where: the file, and what in it. grace_s: what it has to end in, None where nobody says."""

    where: str
    words: list[str]
    grace_s: float | None


def read(path: str) -> str:
    return (DEPLOY / path).read_text()


def kubernetes() -> list[dict[str, Any]]:
    return [found for name in KUBERNETES for found in yaml.safe_load_all(read(f"kubernetes/{name}"))]


def of_kind(kind: str) -> dict[str, Any]:
    (found,) = [each for each in kubernetes() if each["kind"] == kind]
    return found


def compose() -> dict[str, Any]:
    return yaml.safe_load(read("compose.yaml"))


def unit(name: str) -> dict[str, list[str]]:
    """A systemd unit's settings; a setting may be given several times."""
    settings: dict[str, list[str]] = {}
    for line in read(f"systemd/{name}").splitlines():
        if line and line[0] not in "#;[":
            key, _, value = line.partition("=")
            settings.setdefault(key, []).append(value)
    return settings


UNITS = sorted(path.name for path in (DEPLOY / "systemd").glob("*.service"))


def docker(instruction: str) -> list[str]:
    """The arguments of an instruction, wherever it stands in the Dockerfile; lines that go on are joined."""
    text = re.sub(r"\\\n", " ", "\n".join(line for line in read("docker/Dockerfile").splitlines() if not line.startswith("#")))
    return [line.split(None, 1)[1].strip() for line in text.splitlines() if line.startswith(f"{instruction} ")]


def commands(keys: Path) -> Iterator[Command]:
    """Each command line of ours, with the files' own configurations; keys: in place of the API keys' file."""
    (entrypoint,), (default,) = map(json.loads, docker("ENTRYPOINT")), map(json.loads, docker("CMD"))
    yield Command("Dockerfile", _ours([*entrypoint, *default]), None)
    for name, service in compose()["services"].items():
        if service["image"].startswith("quire:"):
            words = [*service.get("entrypoint", entrypoint), *service["command"]]
            yield Command(f"compose.yaml {name}", _ours(words, DEPLOY / "quire.yaml"), seconds(service["stop_grace_period"]))
    flags = dict(line.split("=", 1) for line in read("systemd/engine.env").splitlines() if line and line[0] != "#")
    for name in UNITS:
        settings = unit(name)
        (line,), (stop,) = settings["ExecStart"], settings["TimeoutStopSec"]
        line = line.replace("$ENGINE_FLAGS", flags["ENGINE_FLAGS"]).replace("%i", "8001")
        line = line.replace("${CREDENTIALS_DIRECTORY}/api-keys", str(keys))
        yield Command(name, _ours(shlex.split(line), DEPLOY / "systemd/quire.yaml"), seconds(stop))
    config = keys.with_name("of-config-map.yaml")
    config.write_text(of_kind("ConfigMap")["data"]["quire.yaml"].replace("/etc/quire/keys/api-keys", str(keys)))
    pod = of_kind("Deployment")["spec"]["template"]["spec"]
    words = [*entrypoint, *pod["containers"][0]["args"]]
    yield Command("kubernetes/quire.yaml", _ours(words, config), pod["terminationGracePeriodSeconds"])


def _ours(words: list[str], config: Path | None = None) -> list[str]:
    """Without what stands before our program, and with a file of ours for --config's."""
    first = next(i for i, word in enumerate(words) if Path(word).name in ("quire", "enginecore"))
    words = [Path(words[first]).name, *words[first + 1 :]]
    return [str(config) if before == "--config" else word for before, word in zip(["", *words], words, strict=False)]


def seconds(text: str | int) -> float:
    """As compose and systemd write them: 110s, 190."""
    return float(str(text).removesuffix("s"))

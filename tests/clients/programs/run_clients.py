"""`make test-clients`: runs client packages and programs against a server, each in its newest release when this was written.

    python tests/clients/programs/run_clients.py [NAME ...] [--list] [--record FOLDER]

Each client has a streamed chat, a tool call and a structured answer, where it has these at all. A table says what worked; the
status is 1 if anything did not. Packages ask the bundled model. Claude Code, Codex and OpenCode, whose prompts are longer than
its context, ask a random model. What is installed stays below build/clients/ for the next time (4 GB).
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

import coding_agents
import installed
import jsonschema
from asks import PERSON_SCHEMA, WEATHER_PARAMETERS
from random_model import make_random_model
from recording_proxy import Seen
from serving import SMALL, Served

KEY, MODEL = "secret", "tiny"
TIMEOUT_S = 300
NPM = ("npm-openai", "npm-anthropic", "npm-ollama", "ai-openai-compatible", "ai-openai", "ai-anthropic")
# Parts that a client does not have, with the reason. All others must be there.
LACKS = {
    "outlines": {"tool": "it has no tools"},
    "aider": {"tool": "edits are text of its own format", "structured": "likewise"},
    "opencode": {"structured": "its command has no schemas"},
}
PARTS = ("chat", "tool", "structured")
T = TypeVar("T")
# Nothing but the server is reached: LiteLLM would ask for a list of prices, the others send traces and look for new versions.
QUIET = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LANGSMITH_TRACING": "false",
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "OTEL_SDK_DISABLED": "true",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONWARNINGS": "ignore",
}


class Row(NamedTuple):
    """parts: of each part "yes", "-" (the client lacks it) or what is wrong."""

    name: str
    version: str
    parts: dict[str, str]
    seconds: float

    @property
    def is_fine(self) -> bool:
        return all(said in ("yes", "-") for said in self.parts.values())


def script_of(name: str) -> list[Path]:
    """The words that run a client's own script. Installs the client."""
    script = f"ask_{name.replace('-', '_')}"
    if name in NPM:
        folder = installed.npm_folder()
        return [installed.tools() / "node", folder / f"{script}.mjs"]
    return [installed.python_of(name), installed.HERE / f"{script}.py"]


def ask_script(words: list[Path], url: str, *more: str) -> dict[str, Any]:
    """The client's findings, which are the script's last line. more: further arguments of the script."""
    with tempfile.TemporaryDirectory() as home:
        env = {name: value for name, value in os.environ.items() if name in ("PATH", "SSL_CERT_FILE", "LANG")}
        done = subprocess.run(
            [*map(str, words), url, KEY, MODEL, *more],
            env={**env, **QUIET, "HOME": home},
            cwd=home,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    assert done.returncode == 0, f"status {done.returncode}: {(done.stderr or done.stdout).strip()[-1500:]}"
    return json.loads(done.stdout.splitlines()[-1])


def ask_program(name: str, folder: Path, url: str, recordings: list[Seen]) -> dict[str, Any]:
    """folder: of npm's packages."""
    place = coding_agents.Place([folder / "node_modules" / ".bin", installed.tools()], url, KEY, recordings)
    found = coding_agents.ask(coding_agents.AGENTS[name], place)
    lock = json.loads((folder / "package-lock.json").read_text())
    return {"version": lock["packages"][f"node_modules/{coding_agents.AGENTS[name].package}"]["version"], **found}


def wrong_with(part: str, value: Any) -> str:
    """Nothing, or what is wrong."""
    if part == "chat":
        whole, parts = value["whole"], value["parts"]
        if not whole or "".join(parts) != whole:
            return f"the stream has {''.join(parts)!r}, the answer at once {whole!r}"
        return "" if len(parts) > 1 else "the stream came in one part"
    if part == "tool":
        wanted, schema = value.get("wanted", "get_weather"), value.get("schema", WEATHER_PARAMETERS)
        if value["name"] != wanted:
            return f"called {value['name']}"
        value = value["arguments"]
    else:
        schema = PERSON_SCHEMA
    error = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(schema).iter_errors(value))
    return f"{error.message} in {value}" if error is not None else ""


def row_of(name: str, install: Callable[[], T], ask: Callable[[T], dict[str, Any]]) -> Row:
    """Installing is not part of the seconds."""
    started = time.monotonic()
    try:
        what = install()
        started = time.monotonic()
        found = ask(what)
    except (AssertionError, subprocess.SubprocessError, OSError, ValueError, KeyError, IndexError, TypeError) as error:
        said = f"{type(error).__name__}: {error}"
        return Row(name, "", dict.fromkeys(PARTS, said), time.monotonic() - started)
    parts = {}
    for part in PARTS:
        if part in LACKS.get(name, {}):
            parts[part] = "-"
        else:
            parts[part] = (wrong_with(part, found[part]) if found.get(part) is not None else "is not there") or "yes"
    return Row(name, found["version"], parts, time.monotonic() - started)


def shown(row: Row) -> Row:
    """The row, which is printed."""
    cells = [said if said in ("yes", "-") else "NO" for said in row.parts.values()]
    print(f"{row.name:22}{row.version:18}" + "".join(f"{cell:12}" for cell in cells) + f"{row.seconds:6.1f}", flush=True)
    for said in dict.fromkeys(said for said in row.parts.values() if said not in ("yes", "-")):
        print(f"    {said}", flush=True)
    return row


def run(names: list[str], record: Path | None) -> bool:
    rows: list[Row] = []
    packages = [name for name in names if name not in coding_agents.AGENTS]
    programs = [name for name in names if name in coding_agents.AGENTS]
    print(f"{'client':22}{'version':18}" + "".join(f"{part:12}" for part in PARTS) + "seconds", flush=True)
    if packages:
        with served() as server:
            rows += [
                shown(row_of(name, partial(script_of, name), lambda words: ask_script(words, server.url))) for name in packages
            ]
    if programs:
        with tempfile.TemporaryDirectory() as folder:
            model = make_random_model(Path(folder) / "random")
            with served(str(model), "--max-num-batched-tokens", "4096") as server:
                for name in programs:
                    recordings: list[Seen] = []
                    ask = partial(ask_program, name, url=server.url, recordings=recordings)
                    rows.append(shown(row_of(name, installed.npm_folder, ask)))
                    if record is not None:
                        keep(record / f"{name}.json", recordings)
    bad = [row.name for row in rows if not row.is_fine]
    print(f"{len(rows) - len(bad)} of {len(rows)} work" + (f"; not {', '.join(bad)}" if bad else ""))
    return not bad


@contextlib.contextmanager
def served(*words: str) -> Iterator[Served]:
    with Served(*words, *SMALL, "--api-key", KEY, "--served-model-name", MODEL) as server:
        server.ready()
        yield server
        assert server.end() == 0, server.output


def keep(file: Path, recordings: list[Seen]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    fields = [{"path": seen.path, "status": seen.status, "body": seen.body} for seen in recordings if seen.body]
    file.write_text(json.dumps(fields, indent=1))


def main() -> None:
    everything = [*installed.REQUIREMENTS, *NPM, *coding_agents.AGENTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="clients; without any, all of them")
    parser.add_argument("--list", action="store_true", help="say their names")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="write what the programs send there")
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in everything]
    if unknown:
        parser.error(f"there is no client {', '.join(unknown)}: --list says which there are")
    if args.list:
        print("\n".join(everything))
        return
    sys.exit(not run(args.names or everything, args.record))


if __name__ == "__main__":
    main()

"""Servers under test: their command lines, and a server's life from its start to the end of its last process.

Every engine is started with the same model folder, context length and share of GPU memory, and without prefix caching, so that
repeated prompts cost all engines the same. A server runs in a process group of its own, which is ended as a whole.
"""

import asyncio
import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from sse_client import Target, ask

HEALTH_INTERVAL_S = 0.01
STOP_S = 60.0


@dataclass(frozen=True)
class Command:
    """A command that starts a server. model: the name it is served under."""

    name: str
    arguments: list[str]
    url: str
    model: str
    env: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of_text(cls, text: str, url: str | None, model: str, name: str = "server") -> "Command":
        """A command as typed. url: None for this machine at the command's --port."""
        port = re.search(r"--port[ =](\d+)", text)
        return cls(name, shlex.split(text), url or f"http://127.0.0.1:{port[1] if port else 8000}", model)


def engine_command(engine: str, model: str, *, port: int, load_format: str, max_model_len: int, memory: float, site: str,
                   options: str = "") -> Command:  # fmt: skip
    """The command of `quire`, `vllm` or `vllm-rust` (its Rust frontend), serving `model` at `port`.

    site: where vLLM is installed, "" for this Python's own site. options: appended unchanged.
    """
    common = ["serve", model, "--port", str(port), "--load-format", load_format, "--max-model-len", str(max_model_len)]
    common += ["--gpu-memory-utilization", str(memory), "--no-enable-prefix-caching", *shlex.split(options)]
    url = f"http://127.0.0.1:{port}"
    if engine == "quire":
        return Command(engine, [sys.executable, "-m", "quire.frontend.cli.main", *common], url, model)
    if engine not in ("vllm", "vllm-rust"):
        raise ValueError(f"no engine is named {engine!r}; there are quire, vllm and vllm-rust")
    env = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    if site:
        env["PYTHONPATH"] = site
    if engine == "vllm-rust":
        env["VLLM_USE_RUST_FRONTEND"] = "1"
    return Command(engine, [sys.executable, "-m", "vllm.entrypoints.cli.main", *common], url, model, env)


class Server:
    """A started server, as a context manager. `log` has its output. Raises RuntimeError if another process listens there."""

    def __init__(self, command: Command, log: Path) -> None:
        if listens(command.url):
            raise RuntimeError(f"{command.name}: something listens at {command.url} already, and would be measured instead")
        self.command, self.log = command, log
        log.parent.mkdir(parents=True, exist_ok=True)
        self.started = time.perf_counter()
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command.arguments,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **command.env},
                process_group=0,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_until_ready(self, timeout_s: float, api_key: str | None = None) -> dict[str, float]:
        """Seconds from process start to /health 200, and to a first streamed token. Raises RuntimeError with the log's end."""
        healthy = self.wait_until_healthy(timeout_s, api_key)
        target = Target.of(self.command.url, "/v1/completions", api_key)
        body = {"model": self.command.model, "prompt": [11] * 16, "max_tokens": 1, "ignore_eos": True, "stream": True}
        answer = asyncio.run(ask(target, target.request(json.dumps(body).encode()), timeout_s=300.0))
        if answer.error or not answer.first:
            raise RuntimeError(
                f"{self.command.name}: the first request failed: {answer.error or 'nothing came'}\n{self.tail()}"
            )
        return {"health_s": healthy, "first_token_s": round(answer.first - self.started, 2)}

    def wait_until_healthy(self, timeout_s: float, api_key: str | None = None) -> float:
        """Seconds from process start to /health 200. Raises RuntimeError."""
        asyncio.run(self._health(timeout_s, api_key))
        return round(time.perf_counter() - self.started, 2)

    async def _health(self, timeout_s: float, api_key: str | None) -> None:
        target = Target.of(self.command.url, "/health", api_key)
        while True:
            answer = await ask(target, target.request(), timeout_s=5.0)
            code = self.process.poll()  # checked first: another server may have answered
            if code is not None:
                raise RuntimeError(f"{self.command.name} ended with exit code {code} while it started\n{self.tail()}")
            if answer.status == 200:
                return
            if time.perf_counter() - self.started > timeout_s:
                raise RuntimeError(f"{self.command.name} was not ready within {timeout_s:g} s\n{self.tail()}")
            await asyncio.sleep(HEALTH_INTERVAL_S)

    def tail(self, num_bytes: int = 3000) -> str:
        return self.log.read_bytes()[-num_bytes:].decode(errors="replace")

    def stop(self) -> float:
        """End it: SIGTERM, and SIGKILL for processes left after STOP_S. Returns the seconds until none was left."""
        begin = time.perf_counter()
        members = tree(self.pid)
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_S)
        deadline = begin + STOP_S
        while any(alive(pid) for pid in members) and time.perf_counter() < deadline:
            time.sleep(0.05)
        for pid in members:
            if alive(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait(10)
        return round(time.perf_counter() - begin, 2)


def listens(url: str) -> bool:
    """Whether any process accepts connections there."""
    parts = urlsplit(url)
    with contextlib.suppress(OSError), socket.create_connection((parts.hostname, parts.port or 80), timeout=5.0):
        return True
    return False


def end_by_signal() -> None:
    """Make SIGTERM raise SystemExit, so that servers are stopped and results kept."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def tree(pid: int) -> list[int]:
    """A process and its descendants, from /proc."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        found.append(todo.pop())
        todo += parents.get(found[-1], [])
    return found


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def machine() -> dict[str, Any]:
    """The GPU, CPUs and package versions of the measurement."""
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, Any] = {"gpu": _gpu_name(), "cpus": len(os.sched_getaffinity(0)), "python": sys.version.split()[0]}
    for package in ("torch", "triton", "uvloop"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _gpu_name() -> str:
    return _smi("name").split("\n")[0] or "none"


def gpu_memory_mib(pids: list[int]) -> float | None:
    """GPU memory used by these processes; if the driver does not report it by process, all that is used on the first GPU."""
    apps = re.findall(r"^(\d+), *(\d+)$", _smi("pid,used_memory", "compute-apps"), re.MULTILINE)
    found = [float(mib) for pid, mib in apps if int(pid) in pids]
    if found:
        return sum(found)
    text = _smi("memory.used").split("\n")[0]
    return float(text) if text.replace(".", "").isdigit() else None


def _smi(what: str, of: str = "gpu") -> str:
    try:
        command = ["nvidia-smi", f"--query-{of}={what}", "--format=csv,noheader,nounits"]
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""

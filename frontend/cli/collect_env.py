"""`quire collect-env`: what a bug report should say about a machine: versions, GPUs, limits. No secrets.

Versions are read from the installed packages' folders, without importing any of them. Environment variables are listed by name,
and with their values only if these cannot be a key or a user's path.
"""

import glob
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from quire.ipc.process.cpus import cpu_share
from quire.ipc.version import VERSION

PACKAGES = (
    "torch", "triton", "transformers", "tokenizers", "safetensors", "huggingface-hub", "numpy", "msgspec", "pyzmq", "httptools",
    "uvloop", "jinja2", "llguidance", "prometheus-client", "pyyaml", "vllm",
)  # fmt: skip
# variables with values that describe how a process runs, and not who runs it
SHOWN = re.compile(r"(CUDA_VISIBLE_DEVICES|OMP_NUM_THREADS|MKL_NUM_THREADS|HF_HUB_OFFLINE|TRITON_INTERPRET)")
NAMED = re.compile(r"(CUDA|NVIDIA|NCCL|TORCH|PYTORCH|TRITON|HF|VLLM|OMP|MKL|UVLOOP|PYTHON)_\w*")


def collect_env() -> int:
    for name, value in report():
        print(f"{name}: {value}")
    return 0


def report() -> Iterator[tuple[str, str]]:
    yield "quire", VERSION
    yield "python", f"{platform.python_version()} ({platform.python_implementation()})"
    yield "system", f"{platform.system()} {platform.release()} {platform.machine()}, {_distribution()}"
    for name, version in versions().items():
        yield name, version
    yield "CPU", f"{_cpu_model()}, {os.cpu_count()} logical, {cpu_share():g} for us"
    yield "memory", _memory()
    yield "open files", "{} (at most {})".format(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield "locked memory", "{} (at most {}) bytes".format(*resource.getrlimit(resource.RLIMIT_MEMLOCK))
    for gpu in gpus():
        yield "GPU", gpu
    for name in sorted(filter(NAMED.fullmatch, os.environ)):
        yield f"environment, {name}", os.environ[name] if SHOWN.fullmatch(name) else "set"


def versions() -> dict[str, str]:
    """Versions of the relevant packages."""
    found: dict[str, str] = {}
    for folder in sys.path:
        for path in glob.glob(os.path.join(glob.escape(folder), "*.dist-info")):
            name, _, version = Path(path).name.removesuffix(".dist-info").partition("-")
            found.setdefault(name.lower().replace("_", "-").replace(".", "-"), version)
    return {name: found.get(name, "not installed") for name in PACKAGES}


def gpus() -> list[str]:
    """One line per GPU from nvidia-smi, or one that says why there is none."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return ["none (there is no nvidia-smi)"]
    query = [command, "--query-gpu=name,memory.total,memory.used,driver_version,compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"nvidia-smi does not answer: {type(error).__name__}"]
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] or ["none (nvidia-smi names none)"]


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _distribution() -> str:
    name = re.search(r'^PRETTY_NAME="?([^"\n]*)', _read("/etc/os-release"), re.MULTILINE)
    return name[1] if name else "unknown"


def _cpu_model() -> str:
    name = re.search(r"^model name\s*: (.*)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return name[1] if name else platform.machine()


def _memory() -> str:
    sizes = dict(re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB", _read("/proc/meminfo"), re.MULTILINE))
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    text = f"{int(sizes.get('MemTotal', 0)) >> 20} GiB, {int(sizes.get('MemAvailable', 0)) >> 20} GiB available"
    return text + (f", limit {int(limit) >> 30} GiB" if limit.isdecimal() else "")

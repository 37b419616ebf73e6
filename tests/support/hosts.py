"""Several hosts on one machine, for tests/serving: agents on loopback (`quire host`), and engines that use them."""

from pathlib import Path

import psutil
from serving import Launched, until

from quire.ipc.links.curve import KeyPair, load_keys, make_keys, write_keys

AGENT, WORKER = "quire.enginecore.hosts", "quire.workers"


class Keys:
    """Of an engine and of hosts, in files of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engine_file = folder / "engine.key"
        self.allow_file = folder / "engines.allow"
        self.hosts_file = folder / "hosts"
        write_keys(self.engine_file, make_keys())
        self.allow_file.write_text(f"# engines\n{self.engine.public.decode()}\n")

    @property
    def engine(self) -> KeyPair:
        return load_keys(self.engine_file)

    def flags(self, *agents: "Agent", num_gpus: int = 1) -> tuple[str, ...]:
        """Of an engine that uses these hosts."""
        lines = [f"{agent.address} {agent.public_key} {num_gpus}\n" for agent in agents]
        self.hosts_file.write_text("# address key gpus\n\n" + "".join(lines))
        return "--hosts", str(self.hosts_file), "--hosts-key-file", str(self.engine_file)


class Agent(Launched):
    """`quire host` on a free port, or on that of one before it."""

    def __init__(
        self,
        keys: Keys,
        name: str,
        *arguments: str,
        listen: str = "tcp://127.0.0.1:*",
        env: dict[str, str] | None = None,
    ) -> None:
        self.key_file = keys.folder / f"{name}.key"
        files = "--key-file", str(self.key_file), "--allow-file", str(keys.allow_file)
        super().__init__("quire.frontend.cli.main", "host", "--listen", listen, *files, *arguments, env=env)

    @property
    def address(self) -> str:
        return self.line(r"Quire host ready at (\S+) with ")[1]

    @property
    def public_key(self) -> str:
        self.line("this host's public key")
        return load_keys(self.key_file).public.decode()

    @property
    def agent(self) -> psutil.Process:
        """The process that the command watches."""
        until(lambda: self.pids(AGENT))
        return psutil.Process(self.pid_of(AGENT))

    def worker(self, number: int = 0) -> psutil.Process:
        workers = [process for process in self.processes() if process.pid in self.pids(WORKER)]
        return sorted(workers, key=lambda p: (p.create_time(), p.pid))[number]

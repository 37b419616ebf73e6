"""`quire host`: offers this host's GPUs to an engine on another host. The agent itself is quire.enginecore.hosts, a child that
is started again when it ends.

Keys can be made ahead (`--generate-keys`), or by the first start, which prints the public key.
"""

import argparse
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from quire.ipc.host_config import HostConfig, add_host_arguments
from quire.ipc.process.command import CommandParser, quiet_interrupts, stop_signals

if TYPE_CHECKING:
    from quire.ipc.process.children import Child
    from quire.ipc.process.restarts import Restarts

AGENT_MODULE = "quire.enginecore.hosts"
STOP_GRACE_S = 10.0
STOPPED_LIMIT_S = 8.0  # of the agent
LOOK_S = 1.0


def add_host(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    host = commands.add_parser(
        "host",
        help="lend this host's GPUs to an engine on another host",
        description="Run an agent that lends this host's GPUs to an engine on another host. There, `quire serve --hosts FILE` "
        "starts workers on these GPUs through the agent, which watches them and ends them with the engine. "
        "CUDA_VISIBLE_DEVICES says which GPUs. Only engines with a key in --allow-file may use it.",
        epilog="example: quire host --listen tcp://10.0.0.2:7000 --key-file host.key --allow-file engines.allow",
        usage="quire host --listen ADDRESS --key-file FILE --allow-file FILE [FLAGS]",
    )
    add_host_arguments(host)
    host.set_defaults(run=_host, parser=host)


def _host(args: argparse.Namespace) -> int:
    from quire.ipc.links.core_and_hosts import check_host_address
    from quire.ipc.links.curve import ENGINES, load_allow_list, load_or_make_keys

    parser: CommandParser = args.parser
    if args.generate_keys is not None:
        return _generate(args.generate_keys)
    for name in ("listen", "key_file", "allow_file"):
        if getattr(args, name) is None:
            parser.error(f"--{name.replace('_', '-')} is needed")
    try:
        check_host_address(args.listen, listens=True)
        # printed before the list is read: the engine's operator needs it even if something is missing here
        print(f"this host's public key: {load_or_make_keys(args.key_file).public.decode()}", flush=True)
        load_allow_list(args.allow_file, ENGINES)
    except (OSError, ValueError) as error:
        return _failed(str(error))
    fields = {name: getattr(args, name) for name in HostConfig.__struct_fields__ if hasattr(args, name)}
    return _run(HostConfig(**fields))


def _generate(path: str) -> int:
    from quire.ipc.links.curve import make_keys, write_keys

    keys = make_keys()
    try:
        write_keys(path, keys)
    except FileExistsError:
        return _failed(f"{path} is there already: a key is not replaced")
    except OSError as error:
        return _failed(f"{path} cannot be written: {error.strerror}")
    print(f"public key: {keys.public.decode()}")
    return 0


def _run(config: HostConfig) -> int:
    with quiet_interrupts():
        from quire.ipc.process.restarts import Restarts
    host = AgentKeeper(config, Restarts())
    for number in stop_signals():
        signal.signal(number, host.on_stop)
    try:
        return host.run()
    finally:
        host.close()


class AgentKeeper:
    """The agent, which is started again when it has ended or was stopped for too long. A first start that fails, or several in
    a row later, end the command."""

    def __init__(self, config: HostConfig, restarts: "Restarts") -> None:
        self._config, self._restarts = config, restarts
        self._stopping = False
        self._agent: Child | None = None
        self._was_ready = False

    def on_stop(self, *_: object) -> None:
        self._stopping = True
        if self._agent is not None:
            self._agent.send_signal(signal.SIGTERM)

    def is_stopping(self) -> bool:
        """Whether a signal has asked for the end."""
        return self._stopping

    def run(self, start: "Callable[[str, HostConfig], Child] | None" = None) -> int:
        """Returns the exit code, after a signal or when starts are given up. start: in place of `spawn`, for tests."""
        from quire.ipc.process.children import spawn, was_killed

        why, from_outside = "", False
        while not self.is_stopping():
            try:
                agent = self._agent = (start or spawn)(AGENT_MODULE, self._config)
            except OSError as error:  # no process can be started now
                why, from_outside = str(error), False
            else:
                if self.is_stopping():  # the signal came before there was an agent to pass it on to
                    agent.send_signal(signal.SIGTERM)
                why = self.watch(agent)
                from_outside = was_killed(agent.terminate(0.0))
            if self.is_stopping():
                break
            pause_s = self._restarts.ended(time.monotonic(), from_outside) if self._was_ready else None
            if pause_s is None:
                return _failed(why)
            print(f"quire host: {why}; next start in {pause_s:.0f} s", file=sys.stderr, flush=True)
            deadline = time.monotonic() + pause_s
            while not self.is_stopping() and (left := deadline - time.monotonic()) > 0:
                time.sleep(min(left, LOOK_S))
        return 0

    def watch(self, agent: "Child") -> str:
        """Wait for the agent's end; returns why it ended."""
        from quire.ipc.process.children import how_it_ended
        from quire.ipc.process.stopped import StoppedFor

        said, stopped_for = dict[str, str](), StoppedFor()
        while (code := agent.wait(LOOK_S if "ready" in said else 0.0)) is None:
            if "ready" not in said:
                said |= agent.receive(LOOK_S) or {}
                if "ready" in said:
                    self._on_ready(said)
            if (stopped_s := stopped_for.seconds(agent.is_stopped())) > STOPPED_LIMIT_S:
                agent.send_signal(signal.SIGKILL)  # and its workers with it
                return f"the agent was stopped by a signal {stopped_s:.0f} s ago"
        while (more := agent.receive(0.0)) is not None:  # what it sent between our last two looks
            said |= more
            if "ready" in more:  # it was, however short it lived
                self._on_ready(said)
        if "served" in said:
            self._restarts.served()
        if "error" in said:
            return said["error"]
        return "the agent was told to stop" if code == 0 else f"the agent ended unexpectedly ({how_it_ended(code)})"

    def _on_ready(self, said: dict[str, str]) -> None:
        gpus = "no GPU" if said["gpus"] == "0" else "1 GPU" if said["gpus"] == "1" else f"{said['gpus']} GPUs"
        print(f"Quire host ready at {said['ready']} with {gpus}", flush=True)
        self._was_ready = True
        self._restarts.ready(time.monotonic())
        self._config = msgspec.structs.replace(self._config, listen=said["ready"])  # the port that was free, next time too

    def close(self) -> None:
        if self._agent is not None:
            self._agent.terminate(STOP_GRACE_S)


def _failed(why: str) -> int:
    print(f"quire host: {why}", file=sys.stderr)
    return 1

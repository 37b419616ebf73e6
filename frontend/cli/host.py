"""`quire host`: offers this host's GPUs to an engine on another host. The agent itself is quire.enginecore.hosts, a child.

Keys can be made ahead (`--generate-keys`), or by the first start, which prints the public key.
"""

import argparse
import signal
import sys
from typing import TYPE_CHECKING

from quire.ipc.host_config import HostConfig, add_host_arguments
from quire.ipc.process.command import CommandParser, quiet_interrupts, stop_signals

if TYPE_CHECKING:
    from quire.ipc.process.children import Child

AGENT_MODULE = "quire.enginecore.hosts"
STOP_GRACE_S = 10.0
STOPPED_LIMIT_S = 30.0  # of the agent; a running agent waits as long for a silent engine before it ends its workers
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
        from quire.ipc.process.children import spawn
    agent = spawn(AGENT_MODULE, config)
    try:
        for number in stop_signals():
            signal.signal(number, lambda *_: agent.send_signal(signal.SIGTERM))
        return _watch(agent)
    finally:
        agent.terminate(STOP_GRACE_S)


def _watch(agent: "Child") -> int:
    from quire.ipc.process.children import how_it_ended
    from quire.ipc.process.stopped import StoppedFor

    said, stopped_for = None, StoppedFor()
    while (code := agent.wait(LOOK_S if said else 0.0)) is None:
        if said is None and (said := agent.receive(LOOK_S)) is not None and "ready" in said:
            gpus = "no GPU" if said["gpus"] == "0" else "1 GPU" if said["gpus"] == "1" else f"{said['gpus']} GPUs"
            print(f"Quire host ready at {said['ready']} with {gpus}", flush=True)
        if (stopped_s := stopped_for.seconds(agent.is_stopped())) > STOPPED_LIMIT_S:
            agent.send_signal(signal.SIGKILL)  # and its workers with it; our caller restarts us
            return _failed(f"the agent was stopped by a signal {stopped_s:.0f} s ago")
    if said is None:
        said = agent.receive(0.0)  # its error, sent between our last two checks
    if said is not None and "error" in said:
        return _failed(said["error"])
    return 0 if code == 0 else _failed(f"the agent ended unexpectedly ({how_it_ended(code)})")


def _failed(why: str) -> int:
    print(f"quire host: {why}", file=sys.stderr)
    return 1

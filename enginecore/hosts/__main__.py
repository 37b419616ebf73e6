"""The agent as a child process of `quire host` or of Ray's actor: it gets its configuration, and reports that it is ready."""

import signal
import sys

import zmq

from quire.enginecore.hosts.agent import Agent
from quire.ipc.host_config import HostConfig
from quire.ipc.interfaces import find_interface
from quire.ipc.links.core_and_hosts import HostToCore
from quire.ipc.links.curve import ENGINES, CoreKeys, KeyPair, load_allow_list, load_or_make_keys, make_keys, parse_key
from quire.ipc.process.children import child_main_config, tell_parent
from quire.ipc.process.command import stop_signals
from quire.ipc.process.logs import set_up_logging

LAST_WORD_S = 1.0  # for the last message, that this host stops, to be sent


def main() -> None:
    config = child_main_config(HostConfig, death_signal=signal.SIGTERM)
    set_up_logging(config.log_level, config.log_format)
    try:
        own = load_or_make_keys(config.key_file) if config.key_file else make_keys()
        link = _bind(config, own)
    except (OSError, ValueError) as error:
        tell_parent({"error": str(error)})
        sys.exit(1)
    agent = Agent(link, find_interface(config.interface) if config.interface else None)
    has_served = list[bool]()

    def served() -> None:
        if not has_served:
            has_served.append(True)
            tell_parent({"served": "yes"})

    agent.on_served = served
    for number in stop_signals():
        signal.signal(number, lambda *_: agent.stop())
    tell_parent({"ready": link.address, "public_key": own.public.decode(), "gpus": str(agent.num_gpus)})
    agent.run()
    link.close(LAST_WORD_S)


def _bind(config: HostConfig, own: KeyPair) -> HostToCore:
    allowed = {parse_key(key) for key in config.admitted}
    if config.allow_file:
        allowed |= load_allow_list(config.allow_file, ENGINES)
    if config.interface:
        find_interface(config.interface)
    try:
        return HostToCore(config.listen, CoreKeys(own, frozenset(allowed)))
    except zmq.ZMQError as error:
        raise ValueError(f"cannot listen at {config.listen}: {error}") from None


if __name__ == "__main__":
    main()

"""AgentActor: the actor that Ray runs on a node of its cluster. It starts an agent there (agent.py), and says where it listens.

Nothing else goes through Ray: the engine and the agent talk to each other directly, by keys that live as long as they do.
Called by ray_hosts.py through Ray, which pickles the arguments and results of these methods: strings.
"""

import os

from quire.ipc.host_config import HostConfig
from quire.ipc.process.children import Child, how_it_ended, spawn

AGENT_MODULE = "quire.enginecore.hosts"
START_TIMEOUT_S = 60.0


class AgentActor:
    """engine_key: the public key that the agent admits. interface: the operator's choice, "" for the node's own address."""

    def __init__(self, engine_key: str, interface: str, log_level: str, log_format: str) -> None:
        self._engine_key, self._interface = engine_key, interface
        self._log_level, self._log_format = log_level, log_format
        self._agent: Child | None = None
        self._said: dict[str, str] = {}

    def agent(self) -> dict[str, str]:
        """Where the agent listens, and its public key; starts an agent if none runs. Raises RuntimeError."""
        import ray

        if self._agent is not None and self._agent.poll() is None:
            return self._said
        if self._agent is not None:
            self._agent.close()
        address = ray.util.get_node_ip_address()
        host = f"[{address}]" if ":" in address else address
        config = HostConfig(
            listen=f"tcp://{host}:*",
            admitted=[self._engine_key],
            interface=None if self._interface else address,
            log_level=self._log_level,
            log_format=self._log_format,
        )
        self._agent = spawn(AGENT_MODULE, config)
        said = self._agent.receive(START_TIMEOUT_S)
        if said is None or "error" in said:
            why = said["error"] if said is not None else how_it_ended(self._agent.terminate(0.0))
            raise RuntimeError(f"the agent cannot start: {why}")
        self._said = said
        return said

    def gpus(self) -> str:
        """The GPUs that Ray assigned to this actor, as CUDA_VISIBLE_DEVICES has them: numbers or names, separated by commas."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

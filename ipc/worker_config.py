"""WorkerConfig: the engine's configuration without open choices and secrets, and one worker's own place.

The daemon makes one WorkerConfig as a template (daemon.py), and WorkerGroup completes it for each rank. It travels as JSON over
the control pipe of a child process, and inside BeginRanks to the agent of another host (messages/hosts.py).
"""

from typing import Literal

import msgspec

from quire.ipc.adapters import AdapterLimits
from quire.ipc.config import EngineConfig
from quire.ipc.interfaces import LOOPBACK, Interface
from quire.ipc.step.sections import max_samples_of


class ResolvedEngineConfig(EngineConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An EngineConfig in which the daemon has decided every open choice. Made by `resolved`."""

    device: Literal["cuda", "cpu"]
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int

    def __post_init__(self) -> None:
        """No checks: the user's values were checked as an EngineConfig."""

    @property
    def max_samples(self) -> int:
        """Most samples of a step where decode rows have drafts; 0: none has."""
        return 0 if self.speculative_config is None else max_samples_of(self.max_num_seqs)


# Fields that only the daemon reads: secrets, paths on the core's host, and a template that may be long. Workers get none.
DAEMON_ONLY = ("hf_token", "hosts", "hosts_key_file", "listen", "curve_secret_key_file", "curve_allow_file", "chat_template")


def resolved(
    config: EngineConfig,
    *,
    device: Literal["cuda", "cpu"],
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    block_size: int,
) -> ResolvedEngineConfig:
    """The part of `config` that workers get: with its open choices decided, and without secrets."""
    values = msgspec.structs.asdict(config) | dict.fromkeys(DAEMON_ONLY)
    values |= {"device": device, "max_model_len": max_model_len, "max_num_seqs": max_num_seqs}
    return ResolvedEngineConfig(**values | {"max_num_batched_tokens": max_num_batched_tokens, "block_size": block_size})


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The configuration that the core sends a worker at its start. File descriptors are the core's numbers: see own_fds."""

    engine: ResolvedEngineConfig
    rank: int  # the tensor-parallel ranks of the first stage come first, then those of the second, and so on
    generation: int  # counts the groups of workers that the core has started; in the result ring's header
    model_dir: str
    control_address: str  # ZeroMQ, the core's end is bound
    plan_ring_fds: list[int]
    result_ring_fds: list[int]
    gpu_index: int = 0  # this rank's GPU, among those that the engine, or its host's agent, sees
    one_host: bool = True  # all ranks are on one host
    group_on_one_host: bool = True  # all ranks with this one's layers are on one host
    adapters: AdapterLimits | None = None  # None: the engine serves no LoRA adapters
    bound_to: Interface = LOOPBACK  # the ranks' sockets, which know no keys, are bound to it

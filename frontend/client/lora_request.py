"""LoRARequest: vLLM's name for the adapter of a request, for `LLM`, `AsyncLLM` and `LLMEngine`.

An adapter is known to the engine by its name. It is loaded when a request first brings it; one of another path under the same
name takes its place, and so does one with load_inplace, once for each LoRARequest object.
"""

import os
from collections.abc import Sequence
from typing import Any

from quire.frontend.client import adapter_calls
from quire.frontend.client.client import Client
from quire.frontend.client.stream import InvalidRequest
from quire.frontend.client.terms import NO_TERMS, Terms
from quire.ipc.adapters import AdapterInfo


class LoRARequest:
    """lora_int_id: a number greater than 0, as in vLLM; the engine goes by the name. lora_path: a folder as PEFT
    saves it, or a hub id, which is downloaded once."""

    def __init__(
        self,
        lora_name: str,
        lora_int_id: int,
        lora_path: str = "",
        base_model_name: str | None = None,
        tensorizer_config_dict: dict[str, Any] | None = None,
        load_inplace: bool = False,
        is_3d_lora_weight: bool = False,
    ) -> None:
        if lora_int_id < 1:
            raise ValueError(f"id must be > 0, got {lora_int_id}")
        if not lora_path:
            raise ValueError("lora_path cannot be empty")
        if tensorizer_config_dict is not None:
            raise NotImplementedError("LoRARequest: adapters are read from safetensors only, not by Tensorizer")
        self.lora_name, self.lora_int_id, self.lora_path = lora_name, lora_int_id, os.fspath(lora_path)
        self.base_model_name, self.load_inplace = base_model_name, load_inplace
        self._is_loaded = False

    name = property(lambda self: self.lora_name)
    path = property(lambda self: self.lora_path)
    adapter_id = property(lambda self: self.lora_int_id)

    def __repr__(self) -> str:
        return f"LoRARequest(lora_name={self.lora_name!r}, lora_int_id={self.lora_int_id}, lora_path={self.lora_path!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoRARequest) and self.lora_name == other.lora_name

    def __hash__(self) -> int:
        return hash(self.lora_name)


async def add_lora(client: Client, request: LoRARequest) -> AdapterInfo:
    """The adapter that a request asks for, which is loaded if it is not there. Raises InvalidRequest, other ClientErrors."""
    if not isinstance(request, LoRARequest):
        raise InvalidRequest(f"lora_request must be a LoRARequest, got {type(request).__name__}")
    if client.welcome.limits.adapters is None:
        raise InvalidRequest("this engine takes no adapters: make it with enable_lora=True")
    known = client.adapters.get(request.lora_name)
    if known is None or not _is_from(known, request.lora_path) or (request.load_inplace and not request._is_loaded):
        known = await adapter_calls.load(client, request.lora_name, request.lora_path, in_place=True)
        client.adapters[request.lora_name] = known
    client.lora_numbers[request.lora_int_id] = request.lora_name
    request._is_loaded = True
    return known


def _is_from(known: AdapterInfo, path: str) -> bool:
    """Whether an adapter is that of a folder or a hub id. The latter are folders of the hub's cache with their names."""
    folder = known.file.folder
    return folder == os.path.realpath(path) or f"/models--{path.replace('/', '--')}/snapshots/" in folder


def _name_of(client: Client, lora_id: int | str) -> str:
    return client.lora_numbers.get(lora_id, "") if isinstance(lora_id, int) else lora_id


async def remove_lora(client: Client, lora_id: int | str) -> bool:
    name = _name_of(client, lora_id)
    if name not in client.adapters:
        return False
    await adapter_calls.unload(client, name)
    client.adapters.pop(name, None)
    return True


async def pin_lora(client: Client, lora_id: int | str) -> bool:
    name = _name_of(client, lora_id)
    if name not in client.adapters:
        return False
    await adapter_calls.pin(client, name)
    return True


def list_loras(client: Client) -> set[int]:
    return {number for number, name in client.lora_numbers.items() if name in client.adapters}


async def terms_of(client: Client, request: LoRARequest | None) -> Terms:
    """The terms of a request with this adapter. Raises InvalidRequest, other ClientErrors."""
    if request is None:
        return NO_TERMS
    return Terms(adapter=adapter_calls.use_of(await add_lora(client, request)))


LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None


def one_each(requests: LoRARequests, count: int) -> list[LoRARequest | None]:
    """One for each of `count` prompts. Raises ValueError."""
    if requests is None or isinstance(requests, LoRARequest):
        return [requests] * count
    if not isinstance(requests, list | tuple):
        raise ValueError(f"lora_request must be a LoRARequest or a list of them, got {type(requests).__name__}")
    if len(requests) != count:
        raise ValueError(f"there are {count} prompts and {len(requests)} lora_requests")
    return list(requests)

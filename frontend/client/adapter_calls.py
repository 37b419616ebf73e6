"""A client's calls about LoRA adapters: find, load, unload and pin them. They do not wait for requests."""

from quire.frontend.client.client import Client
from quire.frontend.client.stream import NotFound
from quire.ipc.adapters import AdapterInfo, AdapterUse
from quire.ipc.messages.utilities import AdapterLoaded, AdapterUnloaded, FindAdapter, LoadFolder, PinAdapter, UnloadAdapter


async def find(client: Client, name: str, key: str = "") -> AdapterInfo:
    """An adapter; one that we have not been told of is asked for, and loaded if the engine loads on demand. key: for whom.

    Raises NotFound, InvalidRequest for one that cannot be loaded, other ClientErrors."""
    if (known := client.adapters.get(name)) is not None:
        return known
    if client.welcome.limits.adapters is None:
        raise NotFound(f"The model {name!r} does not exist.")
    return (await client.utility(FindAdapter(name, key), AdapterLoaded)).adapter


async def load(client: Client, name: str, path: str, *, in_place: bool = False) -> AdapterInfo:
    """Load an adapter from a folder on the engine's host. Raises NotFound, InvalidRequest, other ClientErrors."""
    return (await client.utility(LoadFolder(name, path, in_place), AdapterLoaded)).adapter


async def unload(client: Client, name: str) -> None:
    """Raises NotFound, other ClientErrors."""
    await client.utility(UnloadAdapter(name), AdapterUnloaded)


async def pin(client: Client, name: str) -> None:
    """Load an adapter into a slot on the device and keep it there. Raises NotFound, InvalidRequest, other ClientErrors."""
    await client.utility(PinAdapter(name), AdapterLoaded)


def use_of(adapter: AdapterInfo) -> AdapterUse:
    """The words of a request that asks for this adapter."""
    return AdapterUse(adapter.name, adapter.file)

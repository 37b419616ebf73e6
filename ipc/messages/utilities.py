"""A frontend's calls to the engine beside requests, and their answers: members of Utility and UtilityResult.

Each call is a struct of the union UtilityCall: a new one is a struct here, a `case` in enginecore/utilities.py and a caller in
a frontend. Each call is answered once; the answer is dropped if the frontend has gone.
"""

from typing import Literal

from quire.ipc.adapters import AdapterInfo
from quire.ipc.messages.message import Message


# ---------------------------------------------------------------------------------------------------------------- calls
class ResetPrefixCache(Message, tag="reset_prefix_cache", frozen=True):
    """Forget all prefixes. Answered by ResetDone."""


class StartProfile(Message, tag="start_profile", frozen=True):
    """Every worker starts its profiler. Answered by ProfileDone, without traces."""


class StopProfile(Message, tag="stop_profile", frozen=True):
    """Every worker writes its trace. Answered by ProfileDone."""


class GetServerInfo(Message, tag="get_server_info", frozen=True):
    """Answered by ServerInfo."""


class LoadFolder(Message, tag="load_folder", frozen=True):
    """Load an adapter from a folder on the engine's host. Answered by AdapterLoaded when every rank has read it."""

    name: str
    path: str
    in_place: bool = False  # it may replace an adapter of this name


class UnloadAdapter(Message, tag="unload_adapter", frozen=True):
    """Forget an adapter's name; requests that hold it go on. Answered by AdapterUnloaded."""

    name: str


class FindAdapter(Message, tag="find_adapter", frozen=True):
    """An adapter, which is loaded now if the engine loads on demand. Answered by AdapterLoaded."""

    name: str
    key: str = ""  # a digest of the API key that asks, of which few loads are under way at a time


class PinAdapter(Message, tag="pin_adapter", frozen=True):
    """Load an adapter into an adapter slot and keep it there. Answered by AdapterLoaded."""

    name: str


class RestoreAdapters(Message, tag="restore_adapters", frozen=True):
    """Adapters that were loaded into an engine which was lost, or into the other replicas. Those that this engine lacks, or has
    from an earlier load, are loaded if their files are still the same. Answered by AdaptersRestored."""

    adapters: list[AdapterInfo]


UtilityCall = (
    ResetPrefixCache
    | StartProfile
    | StopProfile
    | GetServerInfo
    | LoadFolder
    | UnloadAdapter
    | FindAdapter
    | PinAdapter
    | RestoreAdapters
)


# -------------------------------------------------------------------------------------------------------------- answers
class ResetDone(Message, tag="reset_done", frozen=True):
    complete: bool  # False: requests are running, and their blocks will be cached again


class ProfileDone(Message, tag="profile_done", frozen=True):
    traces: list[str]  # file names, of all ranks


class ServerInfo(Message, tag="server_info", frozen=True):
    config: dict[str, str | int | float | bool | list[str] | None]  # the engine's settings, without secrets


class AdapterLoaded(Message, tag="adapter_loaded", frozen=True):
    adapter: AdapterInfo


class AdapterUnloaded(Message, tag="adapter_unloaded", frozen=True):
    pass


class AdaptersRestored(Message, tag="adapters_restored", frozen=True):
    failed: list[str]  # names of those that could not be loaded


class UtilityFailed(Message, tag="utility_failed", frozen=True):
    code: Literal["invalid", "engine_error", "not_found", "overloaded"]
    message: str  # for the user


UtilityAnswer = ResetDone | ProfileDone | ServerInfo | AdapterLoaded | AdapterUnloaded | AdaptersRestored | UtilityFailed

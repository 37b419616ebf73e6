"""A frontend's calls to the engine beside requests, and their answers: members of Utility and UtilityResult.

Each call is a struct of the union UtilityCall: a new one is a struct here, a `case` in enginecore/utilities.py and a caller in
a frontend. Each call is answered once; the answer is dropped if the frontend has gone.
"""

from typing import Literal

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


UtilityCall = ResetPrefixCache | StartProfile | StopProfile | GetServerInfo


# -------------------------------------------------------------------------------------------------------------- answers
class ResetDone(Message, tag="reset_done", frozen=True):
    complete: bool  # False: requests are running, and their blocks will be cached again


class ProfileDone(Message, tag="profile_done", frozen=True):
    traces: list[str]  # file names, of all ranks


class ServerInfo(Message, tag="server_info", frozen=True):
    config: dict[str, str | int | float | bool | list[str] | None]  # the engine's settings, without secrets


class UtilityFailed(Message, tag="utility_failed", frozen=True):
    code: Literal["invalid", "engine_error"]
    message: str  # for the user


UtilityAnswer = ResetDone | ProfileDone | ServerInfo | UtilityFailed

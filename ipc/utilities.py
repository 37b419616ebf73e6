"""What a frontend may ask of the engine beside requests, and what it is answered: parts of Utility and UtilityResult.

Each call is a struct of the union UtilityCall, so that a new one, with whatever arguments, is a struct here, a `case` in
enginecore/utilities.py and a caller in a frontend. Answers travel once; a call whose frontend has gone is answered to nobody.
"""

from typing import Literal

import msgspec


class _Part(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """As ipc.messages.Message."""


# ---------------------------------------------------------------------------------------------------------------- calls
class ResetPrefixCache(_Part, tag="reset_prefix_cache", frozen=True):
    """Forget all prefixes. Answered by ResetDone."""


class StartProfile(_Part, tag="start_profile", frozen=True):
    """Every worker begins to record what it does. Answered by ProfileDone, without traces."""


class StopProfile(_Part, tag="stop_profile", frozen=True):
    """Every worker writes its trace. Answered by ProfileDone."""


class GetServerInfo(_Part, tag="get_server_info", frozen=True):
    """Answered by ServerInfo."""


UtilityCall = ResetPrefixCache | StartProfile | StopProfile | GetServerInfo


# -------------------------------------------------------------------------------------------------------------- answers
class ResetDone(_Part, tag="reset_done", frozen=True):
    complete: bool  # False: requests run, whose blocks will be cached again


class ProfileDone(_Part, tag="profile_done", frozen=True):
    traces: list[str]  # file names, of all ranks


class ServerInfo(_Part, tag="server_info", frozen=True):
    config: dict[str, str | int | float | bool | list[str] | None]  # what the engine runs with, without secrets


class UtilityFailed(_Part, tag="utility_failed", frozen=True):
    code: Literal["invalid", "engine_error"]
    message: str  # for the user


UtilityAnswer = ResetDone | ProfileDone | ServerInfo | UtilityFailed

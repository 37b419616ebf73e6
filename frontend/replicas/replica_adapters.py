"""Adapters of several engines: all have the same, whatever becomes of an engine during a load or while it is away.

Functions over the engines' clients; replicas.py calls them. An engine that connects is told what the others have (replica.py).
"""

import asyncio
from collections.abc import Collection, Coroutine, Sequence
from typing import Any

from quire.frontend.client.stream import EngineDown, NotFound
from quire.frontend.replicas.replica import Replica
from quire.ipc.adapters import AdapterInfo
from quire.ipc.messages.utilities import (
    AdapterLoaded,
    AdaptersRestored,
    AdapterUnloaded,
    LoadFolder,
    RestoreAdapters,
    UnloadAdapter,
    UtilityCall,
)


def serving(engines: Sequence[Replica], mismatched: Collection[int]) -> list[Replica]:
    """Engines that are connected and have all adapters."""
    return [e for e in engines if e.is_connected and not e.is_restoring and e.number not in mismatched]


def adapters_of(engines: Sequence[Replica]) -> dict[str, AdapterInfo] | None:
    """The adapters of any of these engines; None if there is no engine."""
    return {name: info for engine in engines for name, info in engine.adapters.items()} if engines else None


def remember(call: UtilityCall, away: Sequence[Replica]) -> None:
    """A load or an unload is done: note what it means for engines that are away."""
    for engine in away:
        if isinstance(call, UnloadAdapter):
            engine.unloaded_meanwhile.add(call.name)
        elif isinstance(call, LoadFolder):
            engine.unloaded_meanwhile.discard(call.name)


async def unload_late(engine: Replica) -> None:
    """Unload from an engine that has connected what was unloaded from the others while it was away."""
    names = [name for name in engine.unloaded_meanwhile if engine.adapters.pop(name, None) is not None]
    engine.unloaded_meanwhile.clear()
    await asyncio.gather(*(engine.utility(UnloadAdapter(n), AdapterUnloaded) for n in names), return_exceptions=True)


def failures_of(
    call: UtilityCall, engines: Sequence[Replica], answers: Sequence[object]
) -> list[tuple[Replica, BaseException]]:
    """The failures of a call to all engines. If a load or an unload was done somewhere, an engine that was lost meanwhile is
    none: it does as the others when it comes back. Nor is one that had no such adapter to unload."""
    both = zip(engines, answers, strict=True)
    failures = [(engine, answer) for engine, answer in both if isinstance(answer, BaseException)]
    if len(failures) == len(answers) or not isinstance(call, LoadFolder | UnloadAdapter):
        return failures
    return [
        (engine, failure)
        for engine, failure in failures
        if not (isinstance(failure, EngineDown) and not engine.is_connected)
        and not (isinstance(failure, NotFound) and isinstance(call, UnloadAdapter))
    ]


async def undo_load(call: LoadFolder, engines: Sequence[Replica], answers: Sequence[object]) -> None:
    """A load has failed on some engines: undo it on the others, which get back what it has replaced there."""
    done = [engine for engine, answer in zip(engines, answers, strict=True) if isinstance(answer, AdapterLoaded)]
    before = [info for e in engines if e not in done and (info := e.adapters.get(call.name)) is not None][:1]
    work: list[Coroutine[Any, Any, object]] = []
    for engine in done:  # no request comes between the two
        work.append(engine.utility(UnloadAdapter(call.name), AdapterUnloaded))
        if before:
            work.append(engine.utility(RestoreAdapters(before), AdaptersRestored))
    await asyncio.gather(*work, return_exceptions=True)


async def follow(call: UtilityCall, answers: Sequence[object], late: Sequence[Replica]) -> None:
    """A load or an unload is done: let engines that have connected meanwhile do the same."""
    work: list[Coroutine[Any, Any, object]] = []
    if isinstance(call, LoadFolder):
        infos = [answer.adapter for answer in answers if isinstance(answer, AdapterLoaded)]
        work = [engine.utility(RestoreAdapters(infos[:1]), AdaptersRestored) for engine in late]
    elif isinstance(call, UnloadAdapter):
        work = [engine.utility(call, AdapterUnloaded) for engine in late]
    await asyncio.gather(*work, return_exceptions=True)

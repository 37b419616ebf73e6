"""Answers the calls of frontends about adapters (ipc/messages/utilities.py). Called by Utilities."""

from collections.abc import Callable

from quire.enginecore.adapters.adapters import Adapters, Outcome
from quire.ipc.adapters import problem_with_name
from quire.ipc.messages.utilities import (
    AdapterLoaded,
    AdaptersRestored,
    AdapterUnloaded,
    FindAdapter,
    LoadFolder,
    PinAdapter,
    RestoreAdapters,
    UnloadAdapter,
    UtilityAnswer,
    UtilityFailed,
)

Call = LoadFolder | UnloadAdapter | FindAdapter | PinAdapter | RestoreAdapters


def answer_call(adapters: Adapters | None, call: Call, answer: Callable[[UtilityAnswer], None]) -> None:
    """adapters: None if the engine takes none."""
    if adapters is None:
        text = "this engine takes no adapters: start it with --enable-lora"
        return answer(UtilityFailed("not_found" if isinstance(call, FindAdapter) else "invalid", text))

    def loaded(outcome: Outcome) -> None:
        answer(outcome if isinstance(outcome, UtilityFailed) else AdapterLoaded(outcome.info))

    match call:
        case LoadFolder(name=name) if problem := problem_with_name(name):
            answer(UtilityFailed("invalid", problem))
        case LoadFolder():
            adapters.load(call.name, call.path, call.in_place, loaded)
        case UnloadAdapter():
            adapters.unload(call.name, lambda o: answer(o if isinstance(o, UtilityFailed) else AdapterUnloaded()))
        case FindAdapter():
            adapters.find(call.name, loaded, call.key)
        case PinAdapter():
            adapters.pin(call.name, loaded)
        case RestoreAdapters():
            adapters.restore(call.adapters, lambda failed: answer(AdaptersRestored(failed)))
    return None

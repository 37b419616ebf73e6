"""Merge messages of several engines into one: Welcomes and answers to utility calls; and check that the engines match.

Pure functions over messages; replicas.py calls them.
"""

from collections.abc import Sequence

import msgspec

from quire.frontend.client.async_client import AsyncClient
from quire.ipc.messages.frontend import EngineLimits, Welcome
from quire.ipc.messages.utilities import (
    ProfileDone,
    ResetDone,
    ServerInfo,
    UtilityAnswer,
)
from quire.ipc.numerics import differing_flags


def different_models(one: AsyncClient, other: AsyncClient) -> str | None:
    """Why these two engines cannot be used as one, naming both; None if they can."""
    a, b = one.welcome, other.welcome
    both = f"the engine at {one.address} serves {_names(a)}, the one at {other.address} {_names(b)}"
    if a.served_model_names != b.served_model_names:
        return f"{both}: engines that are used as one must serve one model under the same names"
    files, other_files = ({file.name: file.digest for file in welcome.files} for welcome in (a, b))
    if names := sorted(name for name in {*files, *other_files} if files.get(name) != other_files.get(name)):
        return f"{both}, but they are different models: their {', '.join(names)} differ"
    if a.limits.pooling != b.limits.pooling:
        return f"{both}, but they pool in different ways: --runner, --convert and --pooler-config must be the same"
    if a.model_digest != b.model_digest:
        return f"{both}, but they are different models: their config.json, --hf-overrides or weights differ"
    if (a.limits.vocab_size, a.eos_token_ids) != (b.limits.vocab_size, b.eos_token_ids):
        return f"{both}, but they are different models: their vocabularies or end tokens differ"
    if flags := differing_flags(a.numerics, b.numerics):
        return f"{both}, but they do not answer alike: they differ in {flags}"
    return None


def _names(welcome: Welcome) -> str:
    return ", ".join(map(repr, welcome.served_model_names))


def holds_for_all(welcomes: Sequence[Welcome]) -> Welcome:
    """The first Welcome, with limits that every engine can meet; max_num_seqs is the sum."""
    limits = [welcome.limits for welcome in welcomes]
    common = EngineLimits(
        max_model_len=min(each.max_model_len for each in limits),
        vocab_size=limits[0].vocab_size,
        max_num_seqs=sum(each.max_num_seqs for each in limits),
        max_logprobs=min(each.max_logprobs for each in limits),
        takes_marks=any(each.takes_marks for each in limits),
        pooling=limits[0].pooling,
        adapters=limits[0].adapters,
    )
    return msgspec.structs.replace(welcomes[0], limits=common, spins=any(welcome.spins for welcome in welcomes))


def together(answers: Sequence[UtilityAnswer]) -> UtilityAnswer:
    """Merge answers of one kind. The configuration is the first engine's."""
    match answers[0]:
        case ResetDone():
            return ResetDone(all(answer.complete for answer in answers if isinstance(answer, ResetDone)))
        case ProfileDone():
            return ProfileDone([trace for answer in answers if isinstance(answer, ProfileDone) for trace in answer.traces])
        case ServerInfo(config):
            return ServerInfo({**config, "data_parallel_size": len(answers)})
    return answers[0]

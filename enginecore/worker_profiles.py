"""The profiles of all workers of a group as one; and `WorkersFailed`, with which a group ends."""

from collections.abc import Sequence

import msgspec

from quire.ipc.messages.workers import WorkerProfile


class WorkersFailed(Exception):
    """The workers cannot start or go on; the text is for the user."""


def profile_of_all(profiles: Sequence[WorkerProfile]) -> WorkerProfile:
    """The group's profile: the fewest blocks of any rank, the most bytes of any. Raises WorkersFailed if ranks do not match.

    All ranks must have the same KV groups and block size: a block table names the same layers everywhere, even those of other
    stages.
    """
    first = profiles[0]
    for profile in profiles[1:]:
        own, others = ((p.block_size, p.vocab_size, p.kv_groups) for p in (profile, first))
        if own != others:
            raise WorkersFailed(f"worker {profile.rank} has other KV groups than worker {first.rank}: they do not fit together")
    return msgspec.structs.replace(
        first,
        num_blocks=min(p.num_blocks for p in profiles),
        num_states=min(p.num_states for p in profiles),
        state_bytes=max(p.state_bytes for p in profiles),
        weights_bytes=max(p.weights_bytes for p in profiles),
        activation_bytes=max(p.activation_bytes for p in profiles),
        block_bytes=max(p.block_bytes for p in profiles),
        device=first.device if len(profiles) == 1 else f"{len(profiles)} x {first.device}",
    )

"""LostRequests: requests that outlive their engine. When it is lost, they wait here until another one goes on with them.

A request is sent again with the output that it has (`Resume`), so its consumer only waits. It goes to another engine at once,
or to the engine that comes back. It ends with an error if none comes in time, if another model comes, or if it was in flight at
two losses without a new token between them: it may be the cause. If this is so for several requests, or some may only have
waited, each of them may see two losses more. A step of a beam search ends with its engine.

Owned by AsyncClient, which tells of losses and sends. enginecore/replay.py does the same for requests of workers that died.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator

import msgspec

from quire.frontend.client.pooling import PooledState
from quire.frontend.client.stream import ClientError, DeadlineExceeded, EngineDown, EngineError, RequestState
from quire.ipc.limits import output_limit, output_room
from quire.ipc.messages.frontend import AddRequest, Resume, Welcome

HOLD_S = 120.0  # how long requests wait for an engine: a large model takes minutes to load
MOST_LOSSES = 2  # of a request, without a token between them
MOST_LOSSES_OF_SEVERAL = 4  # of one that is not the only one, or may not have run, as requests waited in its engine

Model = tuple[object, ...]
State = RequestState | PooledState


def model_of(welcome: Welcome) -> Model:
    """Equal for engines between which requests can move."""
    files = tuple(sorted((file.name, file.digest) for file in welcome.files))
    return (
        welcome.model_digest,
        files,
        welcome.limits.vocab_size,
        welcome.limits.pooling,
        tuple(welcome.eos_token_ids),
        welcome.numerics,
    )


class LostRequests:
    """By id, in the order in which they were sent first."""

    def __init__(self) -> None:
        self._states: dict[int, State] = {}
        self._model: Model = ()  # of the engines that they ran on
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[State]:
        return iter(list(self._states.values()))

    def add(self, states: Iterable[State], welcome: Welcome, may_have_waited: bool) -> None:
        """The engine of these requests is lost. may_have_waited: it said that some of its requests waited to run."""
        self._model = model_of(welcome)
        states = list(states)
        repeated = [state for state in states if _num_tokens(state) == state.lost_at]
        is_found = len(repeated) == 1 and not may_have_waited
        for state in states:
            if (error := _note_loss(state, MOST_LOSSES if is_found else MOST_LOSSES_OF_SEVERAL)) is not None:
                state.fail(error)
            else:
                self._states[state.id] = state

    def fail_after(self, seconds: float, error: ClientError) -> None:
        """End those that are still here so much later with this error."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds <= 0 or not self._states:
            return self.fail_all(error)
        self._timer = asyncio.get_running_loop().call_later(seconds, self.fail_all, error)
        return None

    def fail_all(self, error: ClientError) -> None:
        states, self._states = self._states, {}
        for state in states.values():
            state.fail(error)

    def abort(self, request_id: int) -> None:
        """End a request because it is not wanted any more; nothing if it is not here."""
        state = self._states.pop(request_id, None)
        if state is not None:
            state.abort()

    def expire(self, now: float) -> None:
        """End those past their deadline. now: time.monotonic()."""
        for state in [state for state in self._states.values() if state.deadline <= now]:
            del self._states[state.id]
            state.fail(DeadlineExceeded("the request's timeout has passed"))

    def send(self, welcome: Welcome, send: Callable[[State, AddRequest], None]) -> None:
        """Let engines with this Welcome go on with the requests, as far as `send`, which may raise ClientError, takes them."""
        if not self._states:
            return
        if model_of(welcome) != self._model:
            return self.fail_all(EngineDown("the engine was lost, and another model is served now"))
        for state in list(self._states.values()):
            if not _has_more(state, welcome):
                del self._states[state.id]
                continue
            try:
                send(state, _resumed(state))
            except EngineDown:
                return  # there is none at present
            except ClientError:
                continue
            del self._states[state.id]


def _num_tokens(state: State) -> int:
    return sum(sequence.num_tokens for sequence in state.sequences)


def _note_loss(state: State, most_losses: int) -> ClientError | None:
    """Count a loss; returns the error that the request ends with, None if it goes on."""
    if state.sent is None or state.sent.task.is_search_step:
        return EngineError("the engine was lost, and a beam search ends with it")
    num_tokens = _num_tokens(state)
    if num_tokens != state.lost_at:
        state.lost_at, state.num_losses = num_tokens, 0
    state.num_losses += 1
    if state.num_losses >= most_losses:
        return EngineError("the engine was lost twice while this request was running, which may be the cause")
    return None


def _has_more(state: State, welcome: Welcome) -> bool:
    """End children whose last possible token has come, as the engine's word on why did not; whether others are open."""
    if isinstance(state, PooledState):
        return True
    most = output_limit(
        state.params.max_tokens, output_room(state.num_prompt_tokens, welcome.limits.max_model_len, state.params.max_tokens)
    )
    for sequence in state.sequences:
        if sequence.finish_reason is None and sequence.num_tokens >= most:
            state.end(sequence, "length", None, None)
    if not state.num_open:
        state.news = True
        state.wake()
    return state.num_open > 0


def _resumed(state: State) -> AddRequest:
    """The request as it is sent to another engine."""
    assert state.sent is not None
    if isinstance(state, PooledState):
        state.begin_again()
        return msgspec.structs.replace(state.sent, task=msgspec.structs.replace(state.sent.task, is_resumed=True))
    outputs = [None if sequence.finish_reason is not None else sequence.output_ids() for sequence in state.sequences]
    task = msgspec.structs.replace(state.sent.task, resume=Resume(outputs, state.seed))
    return msgspec.structs.replace(state.sent, task=task)

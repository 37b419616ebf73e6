"""ParamsCheck: lets the classes of the operator's own logits processors refuse requests (vLLM's validate_params).

The classes live in the workers, so the workers are asked, by a control record between two steps; only that request waits. It is
a Preparer (preparation.py), used only if a class has something to check.
"""

from concurrent.futures import Future

import msgspec

from quire.enginecore.preparation import PreparationFailed
from quire.enginecore.scheduling.sequence import Sequence
from quire.enginecore.workers import WorkerGroup
from quire.ipc.messages.frontend import AddRequest
from quire.ipc.messages.workers import CheckParams, ControlReply
from quire.ipc.sampling import SamplingParams

MOST_BYTES = 1 << 15  # of params that are asked about
_LONG = ("allowed_token_ids", "logit_bias", "bad_words", "bad_words_token_ids", "stop", "structured_outputs")


class ParamsCheck:
    def __init__(self, workers: WorkerGroup) -> None:
        self._workers = workers

    def __call__(self, request: AddRequest, sequences: list[Sequence]) -> Future[None] | None:
        if not sequences[0].task.is_processed:
            return None
        check = _Check(self._workers, _that_fits(sequences[0].task.sampling))
        check.ask()
        return check.future


class _Check:
    """The question about one request. It is asked again if the workers die before they answer: once, as it may be the cause."""

    def __init__(self, workers: WorkerGroup, params: SamplingParams) -> None:
        self.future: Future[None] = Future()
        self._workers, self._params = workers, params
        self._num_deaths = 0

    def ask(self) -> None:
        """Ask the workers, when they are ready. Raises WorkersFailed."""
        if self.future.done():
            return
        if self._workers.is_ready:
            self._workers.send_control(lambda number: CheckParams(number, self._params), self._take)
        else:
            self._workers.when_ready.append(self.ask)

    def _take(self, reply: ControlReply) -> None:
        """Take the first rank's answer: every rank says the same."""
        if self.future.done() or reply.rank:
            return
        if reply.error and not self._workers.is_ready and not self._num_deaths:
            self._num_deaths += 1
            self.ask()
        elif reply.error:
            text = "the engine's worker failed while the request was checked"
            self.future.set_exception(PreparationFailed(text, "engine_error"))
        elif reply.payload:
            self.future.set_exception(PreparationFailed(reply.payload.decode()))
        else:
            self.future.set_result(None)


def _that_fits(params: SamplingParams) -> SamplingParams:
    """The parameters, without their long lists if these would not fit a control record."""
    if len(msgspec.msgpack.encode(params)) < MOST_BYTES:
        return params
    return msgspec.structs.replace(params, **dict.fromkeys(_LONG))

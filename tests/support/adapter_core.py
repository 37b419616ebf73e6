"""A CoreByHand that serves adapters, a frontend that asks it to load them, and one that sends requests."""

import msgspec
import numpy as np
from core_by_hand import EPOCH, CoreByHand, add
from fake_worker import VOCAB_SIZE, solo_output

from quire.ipc.adapters import AdapterInfo, AdapterLimits, AdapterUse
from quire.ipc.messages.frontend import RequestError, StepOutputs, Utility, UtilityResult
from quire.ipc.messages.utilities import AdapterLoaded, LoadFolder


class Core(CoreByHand):
    def __init__(self, dirs, **more):
        limits = AdapterLimits(**{"max_loras": 2, "dirs": (str(dirs),), **more.pop("limits", {})})
        super().__init__(adapters=limits, **more)
        self.asker, self.sender = self.frontend(), self.frontend()
        self._number = 0

    @property
    def adapters(self):
        return self.core.requests.adapters

    def ask(self, call):
        self._number += 1
        self.asker.send(Utility(EPOCH, self._number, call))
        while (result := self.answer(self.asker, UtilityResult)).id != self._number:
            pass
        return result.answer

    def load(self, name, folder, **more) -> AdapterInfo:
        answer = self.ask(LoadFolder(name, str(folder), **more))
        assert isinstance(answer, AdapterLoaded), answer
        return answer.adapter

    def send(self, number, name, file=None, **params):
        request = add(number, **{"num_tokens": 10, "max_tokens": 6, **params})
        self.sender.send(msgspec.structs.replace(request, adapter=AdapterUse(name, file) if name else None))

    def output(self, number):
        """A request's tokens, or its error."""
        tokens = []
        while True:
            message = self.answer(self.sender, StepOutputs | RequestError)
            if isinstance(message, RequestError):
                assert message.id == number
                return message
            keys, ids = np.frombuffer(message.keys, np.int64) >> 8, np.frombuffer(message.tokens, np.int32)
            tokens += ids[keys == number].tolist()
            if any(end.key >> 8 == number for end in message.finished):
                return tokens

    def run(self, number, name, **more):
        self.send(number, name, **more)
        return self.output(number)


def expected(adapter, num_tokens=10, max_tokens=6):
    return solo_output([i % VOCAB_SIZE for i in range(num_tokens)], num_tokens + max_tokens, set(), VOCAB_SIZE, adapter)

"""Refused: why a request is refused before it runs. Raised by the parts of intake (intake.py), which makes a message of it."""

from quire.ipc.messages.frontend import ErrorCode


class Refused(Exception):
    """A request is refused: RequestError's code, a text for its user, and when to ask again."""

    def __init__(self, code: ErrorCode, message: str, retry_after_s: int = 0):
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s

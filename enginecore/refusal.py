"""Refusal: why a request is refused before it runs. Raised by the parts of intake (intake.py), which makes a message of it."""

from quire.ipc.messages.frontend import ErrorCode


class Refusal(Exception):
    """Why a request is refused: RequestError's code, and a text for its user."""

    def __init__(self, code: ErrorCode, message: str):
        super().__init__(message)
        self.code = code

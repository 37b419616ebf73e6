"""Trial: compiles a grammar in a child process first: one that would crash, swell or hang the core ends the child instead.

llguidance is fast and bounded for ordinary grammars, but others can end the process that compiles them (limits.py),
and a thread cannot be killed. The child has the vocabulary, little memory, and a limit of CPU time for each grammar. It
translates the requested grammar to Lark, compiles it, tries some tokens, and answers with an error, or with the Lark and the
bytes that it took. Then the core compiles the Lark.

`Trial` is the core's side, used by a thread of compiler.py; `main` is the child's.
"""

import ctypes
import resource
import socket
from collections.abc import Collection

import llguidance
import msgspec
import numpy as np
from llguidance.numpy import fill_next_token_bitmask

from quire.enginecore.grammar.language.places import with_place
from quire.enginecore.grammar.language.texts import in_words, to_lark
from quire.enginecore.grammar.limits import COMPILE_TIMEOUT_S, MAX_MASK_S, PARSER_LIMITS, TRIAL_BYTES, TRIAL_TOKENS
from quire.enginecore.grammar.vocabulary import Vocabulary, VocabularyError, make_vocabulary
from quire.ipc.process.asked_child import AskedChild
from quire.ipc.process.children import child_main_config, own_fds
from quire.ipc.process.framing import data_bytes, limit_this_process, receive, send
from quire.ipc.structured_outputs import StructuredOutputs

MODULE = "quire.enginecore.grammar.trial"


class TrialConfig(msgspec.Struct, frozen=True):
    socket_fd: int
    vocab_size: int
    eos_token_ids: list[int]


class Verdict(msgspec.Struct, frozen=True):
    """error: why the grammar cannot be used, for the user; empty if it can. lark: then the grammar, which takes num_bytes."""

    error: str
    lark: str = ""
    num_bytes: int = 0


_encode = msgspec.msgpack.Encoder().encode
_decode_verdict = msgspec.msgpack.Decoder(Verdict).decode
_decode_wanted = msgspec.msgpack.Decoder(StructuredOutputs).decode

TOO_LONG = f"it takes more than {COMPILE_TIMEOUT_S:g} s to compile"
TOO_LARGE = "it needs more memory, or is nested deeper through references, than is allowed"


class Trial:
    """One child, started for the first grammar, and again after a grammar that ended it. Not thread-safe."""

    def __init__(self, tokenizer_json: bytes, vocab_size: int, eos_token_ids: Collection[int] = ()) -> None:
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._child = AskedChild(MODULE)

    def run(self, wanted: StructuredOutputs, timeout_s: float = COMPILE_TIMEOUT_S) -> Verdict:
        """Try a grammar. Raises OSError if no process can be started, or two were lost that might have judged it,
        VocabularyError if the tokenizer is not supported."""
        if not self._child.is_there:
            self._start()
        answer = self._child.ask(_encode(wanted), timeout_s)
        if answer is None:
            return Verdict(TOO_LONG)
        return _decode_verdict(answer) if answer else Verdict(TOO_LARGE)

    def _start(self) -> None:
        said = self._child.start(lambda fd: TrialConfig(fd, self._vocab_size, self._eos_token_ids), self._tokenizer_json)
        if not said:
            raise OSError("the process that tries grammars did not start")
        if error := _decode_verdict(said).error:
            self.close()
            raise VocabularyError(error)

    def close(self) -> None:
        """End the child now. The next `run` starts another."""
        self._child.close()


# ------------------------------------------------------------------------------------------------- in the child
def main() -> None:
    config = child_main_config(TrialConfig)
    sock = socket.socket(fileno=own_fds([config.socket_fd])[0])
    try:
        vocabulary = make_vocabulary(receive(sock), config.vocab_size, config.eos_token_ids)
    except VocabularyError as error:
        return send(sock, _encode(Verdict(str(error))))
    limit_this_process(TRIAL_BYTES)
    send(sock, _encode(Verdict("")))
    while request := receive(sock):
        send(sock, _encode(judge(_decode_wanted(request), vocabulary)))


def judge(wanted: StructuredOutputs, vocabulary: Vocabulary) -> Verdict:
    """Compile a grammar, and measure how long it takes to continue with a few tokens."""
    before = allocated_bytes()
    try:
        lark = to_lark(wanted, vocabulary.special_names)
    except ValueError as error:
        return Verdict(str(error))
    matcher = _matcher(lark, vocabulary)
    if matcher.is_error():
        return Verdict(with_place(wanted, in_words(wanted, matcher.get_error()), lambda part: _error_of(part, vocabulary)))
    seconds = try_tokens(matcher, vocabulary)
    if seconds > MAX_MASK_S:
        return Verdict(f"it takes {seconds:.2f} s to find out what may follow a token")
    if matcher.is_error():
        return Verdict(in_words(wanted, matcher.get_error()))
    return Verdict("", lark, max(allocated_bytes() - before, len(lark)))


class _MallInfo(ctypes.Structure):
    """mallinfo2(3): bytes, and numbers of pieces, of all arenas."""

    _fields_ = (
        ("arena", ctypes.c_size_t), ("ordblks", ctypes.c_size_t), ("smblks", ctypes.c_size_t), ("hblks", ctypes.c_size_t),
        ("hblkhd", ctypes.c_size_t), ("usmblks", ctypes.c_size_t), ("fsmblks", ctypes.c_size_t), ("uordblks", ctypes.c_size_t),
        ("fordblks", ctypes.c_size_t), ("keepcost", ctypes.c_size_t),
    )  # fmt: skip


_libc = ctypes.CDLL(None)
if hasattr(_libc, "mallinfo2"):
    _libc.mallinfo2.restype = _MallInfo


def allocated_bytes() -> int:
    """Bytes in use. The process itself does not grow while it uses again what earlier grammars have freed."""
    if not hasattr(_libc, "mallinfo2"):  # a C library other than glibc since 2.33
        return data_bytes()
    info = _libc.mallinfo2()
    return int(info.uordblks + info.hblkhd)


def _matcher(lark: str, vocabulary: Vocabulary) -> llguidance.LLMatcher:
    return llguidance.LLMatcher(vocabulary.tokenizer, lark, log_level=0, limits=PARSER_LIMITS)


def _error_of(wanted: StructuredOutputs, vocabulary: Vocabulary) -> str:
    """The error of a grammar by itself; empty if it has none."""
    try:
        matcher = _matcher(to_lark(wanted, vocabulary.special_names), vocabulary)
    except ValueError as error:
        return str(error)
    return in_words(wanted, matcher.get_error()) if matcher.is_error() else ""


def try_tokens(matcher: llguidance.LLMatcher, vocabulary: Vocabulary) -> float:
    """Continue with tokens picked at random; returns the CPU seconds that the slowest took."""
    masks, random, slowest = np.zeros((1, vocabulary.num_words), np.int32), np.random.default_rng(0), 0.0
    for _ in range(TRIAL_TOKENS):
        begin = _cpu_seconds()
        fill_next_token_bitmask(matcher, masks)
        ids = np.flatnonzero(np.unpackbits((masks[0] & vocabulary.known).view(np.uint8), bitorder="little"))
        if matcher.is_error() or not len(ids):
            break
        matcher.consume_token(int(random.choice(ids)))
        slowest = max(slowest, _cpu_seconds() - begin)
        if matcher.is_stopped():
            break
    return slowest


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()

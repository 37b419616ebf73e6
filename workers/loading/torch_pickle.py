"""Reads the tensors' descriptions out of `data.pkl` in a file of torch.save, without unpickling it.

A pickle is a program for a stack machine, and Python's own machine imports and calls what the program names. This one knows the
opcodes that torch.save needs for a dict of tensors, and a closed list of names (`STORAGES`, `CALLS`) for which it has values of
its own: nothing is imported, nothing is called, no attribute is set. Anything else refuses the file. torch_file.py
finds the bytes.
"""

import struct
from typing import Any, NamedTuple

from quire.workers.loading.weight_loader import WeightsError

MAX_VALUES = 4_000_000  # on the stack and in the memo: about 20 a tensor
MAX_DEPTH = 64  # marks within marks

# torch's classes of storages -> safetensors' names of their elements' types
STORAGES = {
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "DoubleStorage": "F64",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}


class Name(NamedTuple):
    """A name that the file mentions, from the closed list: a text, not what it names."""

    module: str
    name: str


class Storage(NamedTuple):
    """A run of elements in the file's entry `data/<key>`."""

    key: str
    dtype: str  # safetensors' name
    size: int  # in elements


class Described(NamedTuple):
    """A tensor: a view of a storage, in elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


ORDERED, TENSOR, PARAMETER = (
    Name("collections", "OrderedDict"),
    Name("torch._utils", "_rebuild_tensor_v2"),
    Name("torch._utils", "_rebuild_parameter"),
)
NAMES = {ORDERED, TENSOR, PARAMETER, *(Name("torch", storage) for storage in STORAGES)}
_MARK = Name("", "mark")


class PickleRefusedError(WeightsError):
    """The file has something else than a dict of tensors; the text names it."""


def read_described(program: bytes) -> dict[str, Described]:
    """The tensors of a state dict by their names. Raises PickleRefusedError."""
    try:
        found = _Machine(program).run()
    except (struct.error, IndexError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, PickleRefusedError):
            raise
        raise PickleRefusedError(f"its data.pkl is damaged ({type(error).__name__})") from None
    if not isinstance(found, dict) or any(not isinstance(name, str) for name in found):
        raise PickleRefusedError("it does not hold a dict of tensors by name")
    if other := next((name for name, value in found.items() if not isinstance(value, Described)), None):
        raise PickleRefusedError(f"{other!r:.80} is not a tensor")
    return found


class _Machine:
    """The stack machine: `run` executes the program up to its STOP and returns the value on top."""

    def __init__(self, program: bytes):
        self._program, self._at = program, 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._marks = 0

    def run(self) -> Any:
        steps = {**_PLAIN, **_VALUES, **_READ}
        while True:
            code = self._bytes(1)
            if code == b".":
                return self._stack.pop()
            step = steps.get(code)
            if step is None:
                raise PickleRefusedError(f"its data.pkl has opcode {code!r}, which no dict of tensors needs")
            step(self)
            if len(self._stack) + len(self._memo) > MAX_VALUES:
                raise PickleRefusedError("its data.pkl holds too many values")

    def _bytes(self, count: int) -> bytes:
        found = self._program[self._at : self._at + count]
        if count < 0 or len(found) < count:
            raise PickleRefusedError("its data.pkl ends early")
        self._at += count
        return found

    def _number(self, form: str) -> int:
        return int(struct.unpack(form, self._bytes(struct.calcsize(form)))[0])

    def _line(self) -> str:
        end = self._program.index(b"\n", self._at)
        return self._bytes(end + 1 - self._at)[:-1].decode("ascii")

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _since_mark(self) -> list[Any]:
        at = len(self._stack) - 1 - self._stack[::-1].index(_MARK)
        values = self._stack[at + 1 :]
        del self._stack[at:]
        self._marks -= 1
        return values

    # ------------------------------------------------------------------------------------------------------ opcodes
    def proto(self) -> None:
        if self._number("<B") > 4:
            raise PickleRefusedError("its data.pkl is of a newer protocol")

    def frame(self) -> None:
        self._bytes(8)

    def mark(self) -> None:
        self._marks += 1
        if self._marks > MAX_DEPTH:
            raise PickleRefusedError("its data.pkl is nested too deeply")
        self._push(_MARK)

    def long(self) -> None:
        self._push(int.from_bytes(self._bytes(self._number("<B")), "little", signed=True))

    def text(self, form: str) -> None:
        self._push(self._bytes(self._number(form)).decode())

    def named(self, module: str, name: str) -> None:
        found = Name(module, name)
        if found not in NAMES:
            raise PickleRefusedError(f"its data.pkl names {module}.{name}"[:200])
        self._push(found)

    def named_by_line(self) -> None:
        self.named(self._line(), self._line())

    def named_on_stack(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self.named(str(module), str(name))

    def put(self, number: int) -> None:
        self._memo[number] = self._stack[-1]

    def memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def tuple_of(self, count: int) -> None:
        values = tuple(self._stack[len(self._stack) - count :]) if count else ()
        if len(values) != count:
            raise PickleRefusedError("its data.pkl is damaged")
        del self._stack[len(self._stack) - count :]
        self._push(values)

    def set_items(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict) or len(values) % 2:
            raise PickleRefusedError("its data.pkl adds items to something else than a dict")
        target.update(zip(values[::2], values[1::2], strict=True))

    def stored(self) -> None:
        """A storage: ("storage", its class, its key, its place, its number of elements)."""
        found = self._stack.pop()
        if not isinstance(found, tuple) or len(found) != 5 or found[0] != "storage":
            raise PickleRefusedError("its data.pkl refers to something else than a storage")
        kind, key, size = found[1], found[2], found[4]
        if not isinstance(kind, Name) or kind.name not in STORAGES or not isinstance(key, str) or not _is_size(size):
            raise PickleRefusedError("its data.pkl refers to a storage that is damaged")
        self._push(Storage(key, STORAGES[kind.name], size))

    def reduce(self) -> None:
        """The value that a name of the list stands for, with its arguments: a tensor, a parameter, an empty dict."""
        arguments, name = self._stack.pop(), self._stack.pop()
        if name == ORDERED and arguments == ():
            self._push({})
        elif name == TENSOR and isinstance(arguments, tuple) and len(arguments) >= 4:
            self._push(_described(*arguments[:4]))
        elif name == PARAMETER and isinstance(arguments, tuple) and arguments and isinstance(arguments[0], Described):
            self._push(arguments[0])
        else:
            raise PickleRefusedError(f"its data.pkl calls {'.'.join(name) if isinstance(name, Name) else 'a value'}"[:200])

    def build(self) -> None:
        """The attributes of a state dict, which are the versions of its modules: they are dropped."""
        state = self._stack.pop()
        if not isinstance(self._stack[-1], dict) or not isinstance(state, dict):
            raise PickleRefusedError("its data.pkl sets the state of something else than a dict")


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _described(storage: object, offset: object, shape: object, stride: object) -> Described:
    is_whole = isinstance(shape, tuple) and isinstance(stride, tuple) and len(shape) == len(stride)
    if not isinstance(storage, Storage) or not is_whole or not all(map(_is_size, (offset, *shape, *stride))):  # type: ignore[misc]
        raise PickleRefusedError("its data.pkl describes a tensor that is damaged")
    found = Described(storage, offset, shape, stride)  # type: ignore[arg-type]
    last = found.offset + sum((n - 1) * step for n, step in zip(found.shape, found.stride, strict=True))
    if 0 not in found.shape and last >= storage.size:
        raise PickleRefusedError("its data.pkl describes a tensor that is larger than its storage")
    return found


def _value(make: Any) -> Any:
    return lambda machine: machine._push(make())


_VALUES = {
    b"N": _value(lambda: None),
    b"\x88": _value(lambda: True),
    b"\x89": _value(lambda: False),
    b"}": _value(dict),
    b"]": _value(list),
    b")": _value(tuple),
}
_PLAIN = {
    b"\x80": _Machine.proto,
    b"\x95": _Machine.frame,
    b"(": _Machine.mark,
    b"\x8a": _Machine.long,
    b"c": _Machine.named_by_line,
    b"\x93": _Machine.named_on_stack,
    b"\x94": _Machine.memoize,
    b"Q": _Machine.stored,
    b"R": _Machine.reduce,
    b"b": _Machine.build,
}
_READ = {
    b"K": lambda machine: machine._push(machine._number("<B")),
    b"M": lambda machine: machine._push(machine._number("<H")),
    b"J": lambda machine: machine._push(machine._number("<i")),
    b"X": lambda machine: machine.text("<I"),
    b"\x8c": lambda machine: machine.text("<B"),
    b"q": lambda machine: machine.put(machine._number("<B")),
    b"r": lambda machine: machine.put(machine._number("<I")),
    b"h": lambda machine: machine._push(machine._memo[machine._number("<B")]),
    b"j": lambda machine: machine._push(machine._memo[machine._number("<I")]),
    b"t": lambda machine: machine._push(tuple(machine._since_mark())),
    b"\x85": lambda machine: machine.tuple_of(1),
    b"\x86": lambda machine: machine.tuple_of(2),
    b"\x87": lambda machine: machine.tuple_of(3),
    b"s": lambda machine: machine.set_items([machine._stack.pop(-2), machine._stack.pop()]),
    b"u": lambda machine: machine.set_items(machine._since_mark()),
}

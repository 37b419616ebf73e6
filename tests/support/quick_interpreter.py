"""Triton's interpreter without work whose result it throws away: the tests of kernels take half as long in it.

`tests/kernels/conftest.py` calls `quicken` where `TRITON_INTERPRET=1` is set. What a kernel computes stays the same.
"""

from collections.abc import Callable
from typing import Any

from triton import language
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpretedFunction, InterpreterError, InterpreterOptions


def quicken() -> None:
    # Each sum and product is also computed in 64 bits and compared with the bounds of its type, for an assertion that
    # exists only with `debug`, which is off.
    interpreter.interpreter_builder.options = InterpreterOptions(sanitize_overflow=False)
    interpreter._get_np_dtype = by_name(interpreter._get_np_dtype)
    patch_once_a_launch()


def by_name(numpy_type: Callable) -> Callable:
    """The same function, which makes a table of all types in each of its calls, asked once for each type of elements."""
    known: dict[str, Any] = {}

    def known_type(triton_type: language.dtype) -> Any:
        name = triton_type.scalar.name
        if name not in known:
            known[name] = numpy_type(triton_type)
        return known[name]

    return known_type


def patch_once_a_launch() -> None:
    """Let a launch replace the functions of triton.language once, not again in each call of a function of a kernel.

    The modules that are replaced are those which a function's own module imports: `triton.language`, its `core`, or both.
    """
    launch, call = GridExecutor.__call__, InterpretedFunction.__call__
    patched: set[tuple[bool, bool]] = set()
    imported: dict[Callable, tuple[bool, bool]] = {}

    def launch_anew(self: GridExecutor, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        try:
            launch(self, *args, **kwargs)
        finally:
            patched.clear()  # it has put the functions back

    def call_patched(self: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
        modules = imported.get(self.fn)
        if modules is None:
            names = self.fn.__globals__.values()
            modules = imported[self.fn] = any(x is language for x in names), any(x is language.core for x in names)
        if modules not in patched:
            patched.add(modules)
            return call(self, *args, **kwargs)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise InterpreterError(repr(error)) from error

    GridExecutor.__call__, InterpretedFunction.__call__ = launch_anew, call_patched

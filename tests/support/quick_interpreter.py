"""Triton's interpreter without work whose result it throws away: the tests of kernels take half as long in it.

`tests/kernels/conftest.py` calls `quicken` where `TRITON_INTERPRET=1` is set. What a kernel computes stays the same.
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

from triton import language
from triton.language import core
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpretedFunction, InterpreterError, InterpreterOptions


def quicken() -> None:
    # Each sum and product is also computed in 64 bits and compared with the bounds of its type, for an assertion that
    # exists only with `debug`, which is off.
    interpreter.interpreter_builder.options = InterpreterOptions(sanitize_overflow=False)
    vars(interpreter).update(_get_np_dtype=by_name(interpreter._get_np_dtype), _patch_builtin=patch_known)
    share_shapes()
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


@functools.cache
def replacements(package: Any) -> list[tuple[str, Callable]]:
    """Functions in place of a module's or class's own. They are made once: each launch went through all members."""
    return [(name, replaced(member)) for name, member in inspect.getmembers(package) if core.is_builtin(member)]


def replaced(member: Callable) -> Callable:
    def call(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        return member(*args, **kwargs, _semantic=interpreter.interpreter_semantic)

    return call


def patch_known(package: Any, builder: Any, scope: Any) -> None:
    for name, replacement in replacements(package):
        scope.set_attr(package, name, replacement)


def share_shapes() -> None:
    """Let all blocks of a shape have one object for it: each result of an operation made a tuple and constants of its own."""

    @functools.cache
    def plain(sizes: tuple[int, ...]) -> tuple[core.tuple, int]:
        return core.tuple(sizes), core.validate_block_shape(sizes)

    @functools.cache
    def constants(sizes: tuple[int, ...]) -> tuple[core.constexpr, core.tuple]:
        return core.constexpr(math.prod(sizes)), core.tuple([core.constexpr(size) for size in sizes])

    def sizes_of(shape: Any) -> tuple[int, ...]:
        shape = shape.value if isinstance(shape, core.constexpr) else shape
        sizes = shape.values if isinstance(shape, core.tuple) else shape
        return tuple([size.value if isinstance(size, core.constexpr) else size for size in sizes])

    def new_block_type(self: core.block_type, element_ty: core.dtype, shape: Any) -> None:
        self.element_ty = element_ty
        self.shape, self.numel = plain(sizes_of(shape))
        if not self.shape.values:
            raise TypeError("0d block_type is forbidden")
        self.name = f"<{self.shape.values}, {element_ty}>"

    def new_tensor(self: core.tensor, handle: Any, type: core.dtype) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = constants(tuple(type.shape.values) if type.is_block() else ())

    core.block_type.__init__, core.tensor.__init__ = new_block_type, new_tensor


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

"""Triton's interpreter without what it repeats for nothing: the same values in a fraction of the time."""

import dataclasses
import functools
import math
import types
from collections.abc import Callable

import numpy as np
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter

Handle, Tensor = interpreter.TensorHandle, core.tensor

# Operators of numbers, and numpy's for them where both sides have the type in which they are computed.
ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
COMPARISONS = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
LOGIC = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
INTEGERS = {  # of signed integers: a quotient is cut off, and its remainder has the sign of what was divided
    "floordiv": lambda left, right: (left - np.fmod(left, right)) // right,
    "mod": np.fmod,
    "lshift": np.left_shift,
    "rshift": np.right_shift,
}
OPERATORS = ARITHMETIC | COMPARISONS | LOGIC | INTEGERS
# Types whose numbers numpy has: not those of 16 and 8 bits that the interpreter keeps as integers.
KINDS = {
    each.name: interpreter._get_np_dtype(each)
    for each in (tl.int1, tl.int8, tl.int16, tl.int32, tl.int64, tl.uint8, tl.uint16, tl.uint32, tl.uint64, tl.float32)
}
LIMITS = {kind: (np.iinfo(kind).min, np.iinfo(kind).max) for kind in KINDS.values() if kind.kind in "iu"}


def hasten() -> None:
    """Once in a process. The interpreter of an older Triton, which patches in another way, is left as it is."""
    if not hasattr(interpreter, "_LangPatchScope"):
        return
    # Overflows are looked for in every sum of integers, and `device_assert` drops what was found unless it debugs.
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = _Patch()
    # What follows has no state, and few different arguments.
    core.pointer_type.__hash__ = core.block_type.__hash__ = core.dtype.__hash__  # equal types have equal names
    interpreter._get_np_dtype = functools.cache(interpreter._get_np_dtype)
    block = functools.cache(lambda element, *shape: core.block_type(element, list(shape)))
    core.block_type.with_element_ty = lambda self, element: block(element, *self.shape)
    interpreter.InterpreterBuilder.get_block_ty = lambda self, element, shape: block(element, *shape)
    core._unwrap_if_constexpr = _unwrap(core._unwrap_if_constexpr)
    core.block_type.__init__ = _block_init(core.block_type.__init__)
    Tensor.__init__ = _init
    semantic = interpreter.TritonSemantic
    semantic.broadcast_impl_value = _broadcast(semantic.broadcast_impl_value)


class _Patch:
    """While a kernel runs, the language's functions are the interpreter's. They are made once, not for every kernel
    and every function that it calls."""

    def __init__(self) -> None:
        anywhere = types.FunctionType((lambda: None).__code__, {"tl": tl, "core": core})
        self._scope = interpreter._patch_lang(anywhere)
        found = {(obj, name): getattr(obj, name) for obj, name, _ in self._scope._changes}
        self._scope.restore()
        self._values = [(obj, name, _leaner(obj, name, value)) for (obj, name), value in found.items()]

    def __call__(self, fn):
        if self._scope._changes:  # a kernel that runs calls another function
            return interpreter._LangPatchScope()
        for change in self._values:
            self._scope.set_attr(*change)
        return self._scope


def _leaner(obj, name, value):
    """The interpreter's function for a builtin without the layers around it, which name the interpreter each."""
    inner = value
    while "member" in (getattr(inner, "__kwdefaults__", None) or {}):
        inner = inner.__kwdefaults__["member"]
    if inner is value or not hasattr(inner, "__wrapped__"):
        return value
    inner, semantic = inner.__wrapped__, interpreter.interpreter_semantic

    def called(*args, **options):
        options["_semantic"] = semantic
        return inner(*args, **options)

    operator = name.strip("_")
    if obj is Tensor and name.startswith("__"):
        if operator in OPERATORS:
            return _quick(called, operator, mirrored=False)
        if operator[:1] == "r" and operator[1:] in ARITHMETIC:
            return _quick(called, operator[1:], mirrored=True)
        if operator == "getitem":
            return _getitem(called)
    return called


def _unwrap(slow):
    plain = {Tensor, int, float, bool, str, type(None), core.dtype, core.block_type, core.pointer_type}

    def unwrap(o):
        kind = type(o)
        if kind in plain:
            return o
        return o.value if kind is core.constexpr else slow(o)

    return unwrap


# ---- tensors, whose shape is their type's ----

_shapes: dict = {}  # of sizes, as a tensor has them: its shape and how many elements. Equal shapes are one object.


def _init(self, handle, type) -> None:
    sizes = tuple(type.shape.values) if type.is_block() else ()
    known = _shapes.get(sizes)
    if known is None:
        known = core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))
        _shapes[sizes] = known
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = known


def _block_init(slow):
    known: dict = {}

    def init(self, element_ty, shape) -> None:
        key = element_ty.name, *(size.value if type(size) is core.constexpr else size for size in shape)
        if key not in known:
            slow(self, element_ty, shape)
            known[key] = self.__dict__.copy()
        else:
            self.__dict__.update(known[key])

    return init


def _broadcast(slow):
    return lambda self, left, right: (left, right) if left.shape is right.shape else slow(self, left, right)


def _getitem(slow):
    """A tensor with more axes, of size 1: x[:, None]."""
    known: dict = {}

    def getitem(self, slices):
        if type(slices) is not tuple or not self.type.is_block():
            return slow(self, slices)
        key = self.type.name, *(each is None for each in slices)
        if any(each is not None and each != slice(None) for each in slices) or key not in known:
            result = slow(self, slices)
            known[key] = result.type
            return result
        return _tensor(self.handle.data[slices], self.handle.dtype.scalar, known[key])

    return getitem


def _tensor(data, scalar, type):
    """`data` is what an operator has made of valid data: its size needs no check."""
    handle = Handle.__new__(Handle)
    handle.data, handle.dtype, handle.attr = data, scalar, {}
    made = Tensor.__new__(Tensor)
    _init(made, handle, type)
    return made


# ---- operators: how one of two types is computed is found out once ----


@dataclasses.dataclass(frozen=True)
class _Plan:
    compute: Callable[[np.ndarray, np.ndarray], np.ndarray]
    kinds: tuple[np.dtype, np.dtype]  # of the left side and of the right
    scalar: core.dtype  # the result's, as its handle has it
    type: core.dtype


def _quick(slow, operator, mirrored):
    """`slow`, which also says what is wrong with types that it refuses, is asked once for each two types."""
    plans = {}

    def quick(self, given_other):
        other = given_other.value if type(given_other) is core.constexpr else given_other
        given = type(other)
        key = self.type.name, other.type.name if given is Tensor else given
        plan = plans.get(key)
        if plan is None:
            result = slow(self, given_other)
            if key not in plans:
                plans[key] = _plan(operator, self, other, result, mirrored)
            return result
        mine, theirs = plan.kinds
        if given is Tensor:
            data = other.handle.data
            if data.dtype != theirs:
                data = data.astype(theirs)
        else:
            limits = LIMITS.get(theirs)
            if limits and not limits[0] <= other <= limits[1]:
                return slow(self, given_other)
            data = np.array([other], theirs)
        own = self.handle.data
        if own.dtype != mine:
            own = own.astype(mine)
        return _tensor(plan.compute(data, own) if mirrored else plan.compute(own, data), plan.scalar, plan.type)

    return quick


def _plan(operator, mine, other, result, mirrored):
    """How numpy computes it. None where the interpreter does more than that."""
    if mine.dtype.is_ptr() or (type(other) is Tensor and other.dtype.is_ptr()):
        way = _pointer_way(mine, other, mirrored) if operator == "add" else None
    else:
        way = _number_way(operator, mine, other)
    if way is None:
        return None
    # A truth is of the type that it was computed from, as the interpreter's handles have it, and splat to that.
    plan = _Plan(*way, tl.int1 if result.dtype == tl.int1 else result.handle.dtype, result.type)
    own = mine.handle.data.astype(plan.kinds[0])
    data = other.handle.data.astype(plan.kinds[1]) if type(other) is Tensor else np.array([other], plan.kinds[1])
    found = plan.compute(data, own) if mirrored else plan.compute(own, data)
    wanted = result.handle.data.astype(found.dtype) if result.dtype == tl.int1 else result.handle.data
    same = (found.dtype, found.shape, found.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes())
    assert same, f"{operator} of {mine} and {other}: {found}, and the interpreter has {wanted}"
    return plan


def _number_way(operator, mine, other):
    if type(other) is Tensor:
        both = {mine.dtype.name, other.dtype.name}
        if not both <= KINDS.keys():
            return None
        scalar = interpreter.interpreter_semantic.computation_type_impl(mine.dtype, False, other.dtype, False, False)
    else:  # a constant is of the tensor's type where it can be
        whole = type(other) is int and mine.dtype.name in KINDS and mine.dtype != tl.int1
        if not whole and not (type(other) is float and mine.dtype == tl.float32):
            return None
        scalar = mine.dtype
    if scalar.name == "int1" and operator not in LOGIC:  # bits that wrap around
        return None
    if operator in INTEGERS and not (mine.dtype.is_int_signed() and scalar.is_int_signed()):
        return None
    return OPERATORS[operator], (KINDS[scalar.name],) * 2


def _pointer_way(mine, other, mirrored):
    pointer, offset = (mine, other) if mine.dtype.is_ptr() else (other, mine)
    if type(offset) is Tensor:
        kind = KINDS.get(offset.dtype.name)
    else:
        kind = KINDS["int64"] if type(offset) is int else None
    if kind not in LIMITS:
        return None
    size = max(1, pointer.dtype.element_ty.primitive_bitwidth // 8)  # bytes

    def moved(address, offset):
        return address + size * offset.astype(np.uint64)

    compute = moved if (pointer is mine) != mirrored else lambda offset, address: moved(address, offset)
    return compute, (KINDS["uint64"], kind) if pointer is mine else (kind, KINDS["uint64"])

"""What instructions on registers compute, as PTX's manual says; registers are arrays of bits, an element a thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .ptx import BYTES, Instruction

Array = np.ndarray[Any, Any]
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SIGNED = {2: np.int16, 4: np.int32, 8: np.int64}


def of_bfloat16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bfloat16(values: Array) -> Array:
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)


def of_float16(bits: Array) -> Array:
    return bits.view(np.float16).astype(np.float32)


def to_float16(values: Array) -> Array:
    return values.astype(np.float16).view(np.uint16)


def of_tfloat32(bits: Array) -> Array:
    return (bits & np.uint32(0xFFFFE000)).view(np.float32)


OF_BITS = {"bf16": of_bfloat16, "f16": of_float16, "tf32": of_tfloat32, "f32": lambda bits: bits.view(np.float32)}


def pairs(bits: Array) -> Array:
    """Return [threads, 2] numbers of 16 bits, the lower ones first."""
    return np.ascontiguousarray(bits).view(np.uint16).reshape(-1, 2)


def _numbers(bits: Array, kind: str) -> Array:
    """The bits of a register as numbers of this kind."""
    width = BYTES[kind]
    if kind in ("f32", "bf16", "f16"):
        return OF_BITS[kind](bits)
    exact = bits.astype(UNSIGNED[width])
    return exact.view(_SIGNED[width]) if kind[0] == "s" else exact


def _bits(numbers: Array, kind: str) -> Array:
    if kind == "f32":
        return numbers.astype(np.float32).view(np.uint32)
    if kind in ("bf16", "f16"):
        return (to_bfloat16 if kind == "bf16" else to_float16)(numbers.astype(np.float32))
    width = BYTES[kind]
    return numbers.astype(_SIGNED[width] if kind[0] == "s" else UNSIGNED[width]).view(UNSIGNED[width])


def _down(exact: Array) -> Array:
    """float64 numbers rounded down to float32."""
    near = exact.astype(np.float32)
    return np.where(near.astype(np.float64) > exact, np.nextafter(near, np.float32(-np.inf)), near)


def _fma(words: tuple[str, ...], a: Array, b: Array, c: Array) -> Array:
    exact = a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)
    return _down(exact) if "rm" in words else exact


def _quotient(a: Array, b: Array) -> Array:
    b = np.where(b == 0, 1, b)
    return np.sign(a) * np.sign(b) * (abs(a) // abs(b))


_FLOATS: dict[str, Callable[..., Array]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "neg": np.negative, "abs": np.abs,
    "min": np.fmin, "max": np.fmax, "sqrt": np.sqrt, "rcp": lambda a: 1 / a,
    "rsqrt": lambda a: 1 / np.sqrt(a.astype(np.float64)), "ex2": lambda a: np.exp2(a.astype(np.float64)),
    "lg2": lambda a: np.log2(a.astype(np.float64)), "tanh": np.tanh,
}
_INTEGERS: dict[str, Callable[..., Array]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "mad": lambda a, b, c: a * b + c, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert, "neg": np.negative, "min": np.minimum,
    "max": np.maximum, "div": _quotient, "rem": lambda a, b: a - _quotient(a, b) * b, "abs": np.abs,
    "popc": lambda a: np.unpackbits(a.view(np.uint8).reshape(len(a), -1), axis=1).sum(1),
}
_PREDICATES: dict[str, Callable[..., Array]] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor,
                                                "not": np.logical_not, "mov": np.copy}
_COMPARED: dict[str, Callable[..., Array]] = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}


def _compare(how: str, a: Array, b: Array) -> Array:
    unordered = np.isnan(a) | np.isnan(b) if a.dtype.kind == "f" else np.zeros(len(a), bool)
    if how in ("num", "nan"):
        return ~unordered if how == "num" else unordered
    if how in _COMPARED:
        return _COMPARED[how](a, b) & (~unordered if how != "ne" else True)
    return _COMPARED[how[:2]](a, b) | unordered  # "neu"


def _convert(instruction: Instruction, *registers: Array) -> Array:
    to, of = instruction.words[-2:]
    if to in ("f16x2", "bf16x2"):
        high, low = (_bits(_numbers(bits, "f32"), to[:-2]).astype(np.uint32) for bits in registers)
        return high << np.uint32(16) | low
    numbers = _numbers(registers[0], of)
    if to == "tf32":
        bits = numbers.view(np.uint32)
        return np.where(np.isfinite(numbers), (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000), bits)
    if "sat" in instruction.words:
        numbers = np.clip(np.nan_to_num(numbers, nan=0.0), 0, 1)
    if numbers.dtype.kind == "f" and to[0] in "us":
        if "rzi" not in instruction.words:
            numbers = np.rint(numbers) if "rni" in instruction.words else np.floor(numbers)
        numbers = numbers.astype(np.int64)
    return _bits(numbers, to)


def _wide(instruction: Instruction, a: Array, b: Array, *added: Array) -> Array:
    kind, double = instruction.kind, {2: "32", 4: "64"}[BYTES[instruction.kind]]
    a, b = (_numbers(bits, kind).astype(np.int64 if kind[0] == "s" else np.uint64) for bits in (a, b))
    made = a * b
    if "hi" in instruction.words:
        return _bits(made >> (8 * BYTES[kind]), kind)
    return _bits(made + _numbers(added[0], kind[0] + double) if added else made, kind[0] + double)


def _shift(instruction: Instruction, bits: Array, by: Array) -> Array:
    kind, size = instruction.kind, 8 * BYTES[instruction.kind]
    numbers, is_left = _numbers(bits, kind), instruction.words[0] == "shl"
    amount = np.minimum(by.astype(np.uint64), size - 1).astype(numbers.dtype)
    made = numbers << amount if is_left else numbers >> amount
    return _bits(np.where(by >= size, 0, made) if is_left or kind[0] != "s" else made, kind)


def _bit_field(instruction: Instruction, bits: Array, start: Array, length: Array) -> Array:
    unsigned = UNSIGNED[BYTES[instruction.kind]]
    first, count, size = int(start[0]), int(length[0]), 8 * BYTES[instruction.kind]
    made = (bits.astype(unsigned) >> unsigned(first)) & unsigned((1 << count) - 1)
    if instruction.kind[0] == "s":
        sign = (made >> unsigned(count - 1)) & unsigned(1)
        made = np.where(sign, made | unsigned(((1 << size) - 1) ^ ((1 << count) - 1)), made)
    return made.astype(unsigned)


def _permute(bits: Array, other: Array, selector: Array) -> Array:
    both = other.astype(np.uint64) << np.uint64(32) | bits.astype(np.uint64)
    made = np.zeros(len(bits), np.uint32)
    for at in range(4):
        nibble = (selector.astype(np.uint64) >> np.uint64(4 * at)) & np.uint64(15)
        byte = (both >> ((nibble & np.uint64(7)) * np.uint64(8))) & np.uint64(255)
        byte = np.where(nibble & np.uint64(8), np.where(byte & np.uint64(128), 255, 0), byte)
        made |= byte.astype(np.uint32) << np.uint32(8 * at)
    return made


def _logic(bits: tuple[Array, ...], table: int) -> Array:
    made = np.zeros_like(bits[0])
    for case in range(8):
        if table >> case & 1:
            made |= np.bitwise_and.reduce([part if case >> (2 - at) & 1 else ~part for at, part in enumerate(bits)])
    return made


def compute(instruction: Instruction, *registers: Array) -> Array:
    """Return the bits of an instruction's result.

    Raises:
        NotImplementedError: for an instruction that is not known here.
    """
    (name, *_), kind = instruction.words, instruction.kind
    if name == "cvt":
        return _convert(instruction, *registers)
    if name == "setp":
        return _compare(instruction.words[1], *(_numbers(bits, kind) for bits in registers))
    if name == "selp":
        return np.where(registers[2], registers[0], registers[1])
    if kind == "pred":
        return _PREDICATES[name](*registers)
    if {"wide", "hi"} & set(instruction.words):
        return _wide(instruction, *registers)
    if name in ("shl", "shr"):
        return _shift(instruction, *registers)
    if name == "bfe":
        return _bit_field(instruction, *registers)
    if name == "prmt":
        return _permute(*registers)
    if name == "lop3":
        return _logic(registers[:3], int(registers[3][0]))
    if kind in ("bf16x2", "f16x2"):
        single = instruction._replace(words=(*instruction.words[:-1], kind[:-2]))
        halves = [compute(single, *(pairs(bits)[:, at].copy() for bits in registers)) for at in range(2)]
        return halves[1].astype(np.uint32) << np.uint32(16) | halves[0]
    numbers = [_numbers(bits, kind) for bits in registers]
    table = _FLOATS if "f" in kind else _INTEGERS
    if name == "fma":
        return _bits(_fma(instruction.words, *numbers), kind)
    if name not in table:
        raise NotImplementedError(f"{instruction.text}: no instruction that is simulated")
    return _bits(table[name](*numbers), kind)

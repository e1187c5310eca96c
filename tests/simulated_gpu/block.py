"""All threads of a block, which run a program."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from . import matrices
from .arithmetic import UNSIGNED, compute, pairs
from .memory import GlobalMemory, SharedMemory
from .ptx import BYTES, Fault, Instruction, Program, parts

Array = np.ndarray[Any, Any]
_MOST_STEPS = 1_000_000
_MMA = re.compile(r"m(?P<rows>\d+)n(?P<columns>\d+)k(?P<depth>\d+)")
# Whose effects are elsewhere: threads run in step, and what others write is there at once.
_NOTHING = ("griddepcontrol", "membar", "discard", "prefetch", "nanosleep", "applypriority")


class Launch(NamedTuple):
    """What all blocks of a launch have.

    Attributes:
        parameters: their bits.
        threads, shared: of a block: their number, and bytes of shared memory.
    """

    program: Program
    memory: GlobalMemory
    parameters: list[int]
    grid: tuple[int, int, int]
    threads: int
    shared: int


class Block:
    """One block; ``place``: which one of the grid. Threads run in step but where their branches part."""

    def __init__(self, launch: Launch, place: tuple[int, int, int]) -> None:
        self._launch, self._memory = launch, launch.memory
        self._number = 1 + place[0] + launch.grid[0] * (place[1] + launch.grid[1] * place[2])
        thread = np.arange(launch.threads, dtype=np.uint32)
        self._lanes, self._warps = (thread % 32).astype(np.int64), (thread // 32 + 1).astype(np.int64)
        self._shared = SharedMemory(launch.shared)
        self._registers: dict[str, Array] = {"%tid.x": thread, "%laneid": thread % 32, "%warpid": thread // 32}
        for i, axis in enumerate("xyz"):
            self._registers |= {f"%ctaid.{axis}": self._all(place[i]), f"%nctaid.{axis}": self._all(launch.grid[i])}
        self._registers |= {"%ntid.x": self._all(launch.threads)}
        # What runs beside the threads: what was begun, and groups that they can wait for.
        self._begun: dict[str, list[Callable[[], None]]] = {"cp": [], "wgmma": []}
        self._groups: dict[str, list[list[Callable[[], None]]]] = {"cp": [], "wgmma": []}

    def run(self) -> None:
        """Run all threads to their end.

        Raises:
            Fault: what a GPU would not do.
            NotImplementedError: for an instruction that is not simulated.
        """
        instructions, labels = self._launch.program
        at, end = np.zeros(self._launch.threads, np.int64), len(instructions)
        for _ in range(_MOST_STEPS):
            line = int(at.min())
            if line >= end:
                if any(self._groups["wgmma"]) or self._begun["wgmma"]:
                    raise Fault("a block ends before its products")
                return
            instruction, here = instructions[line], at == line
            on = here
            if instruction.guard is not None:
                on = here & (self._registers[instruction.guard] ^ instruction.is_negated)
            at[here] = line + 1
            try:
                if instruction.words[0] in ("bra", "ret", "exit"):
                    at[on] = labels[instruction.operands[0]] if instruction.words[0] == "bra" else end
                elif on.any():
                    self._run(instruction, on)
            except Fault as fault:
                raise Fault(f"{fault}: {instruction.text}") from None
        raise Fault("a block does not end")

    def _all(self, number: int, width: int = 4) -> Array:
        return np.full(self._launch.threads, number & ((1 << 8 * width) - 1), UNSIGNED[width])

    def _value(self, operand: str, width: int) -> Array:
        if operand in self._registers:
            return self._registers[operand]
        if operand == "global_smem":
            return self._all(0, width)
        if "_param_" in operand:  # its address, which here is its number
            return self._all(int(operand.rpartition("_")[2]), width)
        if operand.startswith("0f"):
            return self._all(int(operand[2:], 16))
        if operand.startswith("%"):
            raise Fault(f"{operand} is read before it is written")
        return self._all(int(operand.rstrip("U"), 0), width)

    def _set(self, register: str, bits: Array, on: Array) -> None:
        before = self._registers.get(register)
        self._registers[register] = bits if before is None or on.all() else np.where(on, bits, before)

    def _address(self, operand: str) -> Array:
        base, _, offset = operand.strip("[] ").partition("+")
        return self._value(base.strip(), 8).astype(np.int64) + int(offset or "0", 0)

    def _run(self, instruction: Instruction, on: Array) -> None:
        name, words = instruction.words[0], instruction.words
        known = {"ld": self._load, "st": self._store, "cp": self._copy, "mov": self._move, "cvta": self._move,
                 "shfl": self._shuffle, "vote": self._vote, "redux": self._reduce, "ldmatrix": self._load_tiles,
                 "stmatrix": self._store_tiles, "mma": self._product, "wgmma": self._wide_product,
                 "bar": self._barrier, "barrier": self._barrier, "atom": self._atomic, "red": self._atomic}
        if name == "fence":
            if "proxy" in words:
                self._shared.fence()
        elif name in known:
            known[name](instruction, on)
        elif name not in _NOTHING:
            width = 4 if instruction.kind == "pred" else BYTES[instruction.kind]
            self._set(instruction.operands[0], compute(instruction, *(
                self._value(operand, 4 if i and name in ("shl", "shr") else width)
                for i, operand in enumerate(instruction.operands[1:]))), on)

    def _move(self, instruction: Instruction, on: Array) -> None:
        to, of = instruction.operands
        if instruction.kind == "pred":
            is_number = of not in self._registers
            self._set(to, self._all(int(of, 0)) != 0 if is_number else self._registers[of], on)
            return
        width, targets, sources = BYTES[instruction.kind], parts(to), parts(of)
        each = width // max(len(targets), len(sources))
        bits = self._all(0, width)
        for i, source in enumerate(sources):
            bits = bits | self._value(source, each).astype(UNSIGNED[width]) << UNSIGNED[width](8 * each * i)
        for i, target in enumerate(targets):
            self._set(target, (bits >> UNSIGNED[width](8 * each * i)).astype(UNSIGNED[width // len(targets)]), on)

    def _load(self, instruction: Instruction, on: Array) -> None:
        width = BYTES[instruction.kind]
        if instruction.words[1] == "param":
            values = np.array([value % (1 << 64) for value in self._launch.parameters], np.uint64)
            found = values[self._address(instruction.operands[1])].astype(UNSIGNED[width])
            self._set(instruction.operands[0], found, on)
            return
        registers = parts(instruction.operands[0])
        at = self._address(instruction.operands[1])[on]
        if instruction.words[1].startswith("shared"):
            found = self._shared.load(at, width * len(registers), self._warps[on])
        else:
            found = self._memory.load(at, width * len(registers), self._number)
        for register, bits in zip(registers, np.split(found, len(registers), 1), strict=True):
            made = self._all(0, width)
            made[on] = np.ascontiguousarray(bits).view(UNSIGNED[width])[:, 0]
            self._set(register, made, on)

    def _store(self, instruction: Instruction, on: Array) -> None:
        width = BYTES[instruction.kind]
        values = [np.ascontiguousarray(self._value(register, width).astype(UNSIGNED[width])).view(np.uint8)
                  .reshape(-1, width) for register in parts(instruction.operands[1])]
        at, values_ = self._address(instruction.operands[0])[on], np.concatenate(values, 1)[on]
        if instruction.words[1].startswith("shared"):
            self._shared.store(at, values_, self._warps[on])
        else:
            self._memory.store(at, values_, self._number)

    def _atomic(self, instruction: Instruction, on: Array) -> None:
        returns = instruction.words[0] == "atom"
        target, place, value = instruction.operands if returns else ("", *instruction.operands)
        kind, width = instruction.kind, BYTES[instruction.kind]
        how = next(word for word in instruction.words if word in ("add", "max", "min", "or", "and", "exch", "inc"))
        if how == "inc" or "shared" in instruction.text:
            raise NotImplementedError(instruction.text)

        def combine(before: Array, new: Array) -> Array:
            a, b = before.view(UNSIGNED[width]), new.view(UNSIGNED[width])
            made = b if how == "exch" else compute(Instruction(None, False, (how, kind), (), instruction.text), a, b)
            return made.astype(UNSIGNED[width]).view(np.uint8)

        values = np.ascontiguousarray(self._value(value, width).astype(UNSIGNED[width])).view(np.uint8)
        before = self._memory.exchange(self._address(place)[on], values.reshape(-1, width)[on], combine)
        if returns:
            made = self._all(0, width)
            made[on] = before.view(UNSIGNED[width])[:, 0]
            self._set(target, made, on)

    def _beside(self, instruction: Instruction, work: Callable[[], None] | None) -> None:
        """Begin work, end a group, or wait until no more than so many groups run."""
        name, words = instruction.words[0], instruction.words
        if work is not None:
            self._begun[name].append(work)
        elif {"commit_group"} & set(words):
            self._groups[name].append(self._begun[name])
            self._begun[name] = []
        elif {"wait_group", "wait_all"} & set(words):
            most = int(instruction.operands[0]) if instruction.operands else 0
            while len(self._groups[name]) > most:
                for each in self._groups[name].pop(0):
                    each()

    def _copy(self, instruction: Instruction, on: Array) -> None:
        if not any(word.startswith("shared") for word in instruction.words):
            self._beside(instruction, None)
            return
        operands = instruction.operands
        width = int(operands[2], 0)
        given = (self._value(operands[3], 4) if len(operands) > 3 else self._all(width)).astype(np.int64)
        to, of = self._address(operands[0])[on], self._address(operands[1])
        if (of[on] % width).any() or (to % width).any():
            raise Fault(f"{width} bytes at an address that is no multiple of it")
        values, real = np.zeros((len(on), width), np.uint8), on & (given > 0)
        if not np.isin(given[on], (0, width)).all():
            raise NotImplementedError(instruction.text)
        values[real] = self._memory.load(of[real], width, self._number)
        self._beside(instruction, lambda: self._shared.store(to, values[on], self._warps[on]))

    def _barrier(self, instruction: Instruction, on: Array) -> None:
        if "warp" in instruction.words:
            return
        if not on.all():
            raise Fault("a barrier that not all threads reach")
        self._shared.barrier()

    def _shuffle(self, instruction: Instruction, on: Array) -> None:
        if not on.reshape(-1, 32).all(1)[on.reshape(-1, 32).any(1)].all():
            raise Fault("a shuffle that not all threads of a warp reach")
        by, lane = self._value(instruction.operands[2], 4).astype(np.int64), self._lanes
        other = {"idx": by & 31, "bfly": lane ^ by, "up": lane - by, "down": lane + by}[instruction.words[2]]
        other = np.where((other < 0) | (other > 31), lane, other)
        target = instruction.operands[0].partition("|")[0]
        self._set(target, self._value(instruction.operands[1], 4)[(self._warps - 1) * 32 + other], on)

    def _reduce(self, instruction: Instruction, on: Array) -> None:
        self._need_all(on)
        how, kind = instruction.words[2], instruction.kind
        made, *rest = self._value(instruction.operands[1], 4).reshape(-1, 32).T
        for other in rest:
            made = compute(Instruction(None, False, (how, kind), (), instruction.text), made, other)
        self._set(instruction.operands[0], np.repeat(made, 32), on)

    def _vote(self, instruction: Instruction, on: Array) -> None:
        self._need_all(on)
        given = self._value(instruction.operands[1], 4).astype(bool).reshape(-1, 32)
        how = {"any": lambda a: a.any(1), "all": lambda a: a.all(1),
               "ballot": lambda a: (a << np.arange(32)).sum(1).astype(np.uint32)}[instruction.words[2]]
        self._set(instruction.operands[0], np.repeat(how(given), 32), on)

    def _tiles(self, place: str, count: int) -> Array:
        """[count, warps, 8] addresses of lines of matrices."""
        at = self._address(place).reshape(-1, 32)[:, :8 * count]
        return at.reshape(-1, count, 8).transpose(1, 0, 2)

    def _load_tiles(self, instruction: Instruction, on: Array) -> None:
        self._need_all(on)
        registers, warp = parts(instruction.operands[0]), self._warps - 1
        low, high = matrices.tile_places(self._lanes, "trans" in instruction.words)
        for register, lines in zip(registers, self._tiles(instruction.operands[1], len(registers)), strict=True):
            warps = np.repeat(np.arange(len(lines)) + 1, 8)
            found = np.ascontiguousarray(self._shared.load(lines.ravel(), 16, warps)).view(np.uint16).reshape(-1, 8, 8)
            bits = found[(warp, *high)].astype(np.uint32) << np.uint32(16) | found[(warp, *low)]
            self._set(register, bits, on)

    def _store_tiles(self, instruction: Instruction, on: Array) -> None:
        self._need_all(on)
        registers, warp = parts(instruction.operands[1]), self._warps - 1
        low, high = matrices.tile_places(self._lanes, "trans" in instruction.words)
        for register, lines in zip(registers, self._tiles(instruction.operands[0], len(registers)), strict=True):
            values, bits = np.zeros((len(lines), 8, 8), np.uint16), self._value(register, 4)
            values[(warp, *low)], values[(warp, *high)] = pairs(bits).T
            self._shared.store(lines.ravel(), values.view(np.uint8).reshape(-1, 16),
                               np.repeat(np.arange(len(lines)) + 1, 8))

    def _need_all(self, on: Array) -> None:
        if not on.all():
            raise Fault("an instruction of whole warps that not all threads reach")

    def _product(self, instruction: Instruction, on: Array) -> None:
        self._need_all(on)
        made, a, b, c = (parts(operand) for operand in instruction.operands)
        depth, kind = int(_MMA.search(instruction.text)["depth"]), instruction.words[-3]  # type: ignore[index]
        warp, lanes = self._warps - 1, self._lanes
        product = (matrices.left([self._value(name, 4) for name in a], kind, depth, lanes)
                   @ matrices.right([self._value(name, 4) for name in b], kind, depth, lanes))
        for i, (to, added) in enumerate(zip(made, c, strict=True)):
            row, column = matrices.place_of_sum(i, lanes)
            sums = product[warp, row, column] + self._value(added, 4).view(np.float32)
            self._set(to, sums.view(np.uint32), on)

    def _wide_product(self, instruction: Instruction, on: Array) -> None:
        self._need_all(on)
        if "mma_async" not in instruction.words:
            if "fence" not in instruction.words:
                self._beside(instruction, None)
            return
        if self._launch.threads != 128:
            raise NotImplementedError("products of several groups of warps")
        to, a, b, keeps, *flags = instruction.operands
        sizes, kind, lanes = _MMA.search(instruction.text), instruction.kind, self._lanes
        columns, depth = int(sizes["columns"]), int(sizes["depth"])  # type: ignore[index]
        if flags[:2] != ["1", "1"]:
            raise NotImplementedError("products with a sign")
        turned = [int(flag) == 1 for flag in flags[2:]]  # of what lies in shared memory
        if a.startswith("{"):
            one = matrices.left([self._value(name, 4) for name in parts(a)], kind, depth, lanes).reshape(64, depth)
        else:
            one = self._matrix(instruction, a, 64, depth, bool(turned) and turned[0])
        product = one @ self._matrix(instruction, b, columns, depth, bool(turned) and turned[-1]).T
        adds = self._registers[keeps].all() if keeps in self._registers else int(keeps, 0) != 0
        for i, name in enumerate(parts(to)):
            row, column = matrices.place_of_sum(i, lanes)
            sums = product[16 * (self._warps - 1) + row, column]
            if adds:
                sums = sums + self._value(name, 4).view(np.float32)
            self._registers[name] = np.ascontiguousarray(sums).view(np.uint32)

    def _matrix(self, instruction: Instruction, descriptor: str, lines: int, depth: int, is_transposed: bool) -> Array:
        """A matrix that a product reads in shared memory, of which nothing may change until threads waited for it."""
        place = matrices.Descriptor.of(matrices.same_in_all(self._value(descriptor, 8)))

        def read() -> Array:
            return place.read(self._shared, lines, depth, instruction.kind, is_transposed)

        def check() -> None:
            if not np.array_equal(read(), found, equal_nan=True):
                raise Fault("shared memory changes while a product reads it")

        found = read()
        self._beside(instruction, check)
        return found

"""Checks a Hopper kernel's machine code for one mistake: writing a register that an unfinished wgmma still reads.

A wgmma (HGMMA, of 8-bit operands IGMMA or QGMMA) is asynchronous: it owns its operand A, if that is in registers, and its
accumulators until a WARPGROUP.DEPBAR has waited for its group (`gsb0` ends one). Instructions are followed along every branch,
with the unfinished groups.
"""

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Za-z0-9_.]+)\s*(.*?)\s*;")
LABEL = re.compile(r"^(\.L_\w+):")
TARGET = re.compile(r"`\((\.L_\w+)\)")
# These write no general register, or none that is their first operand.
NO_RESULT = ("ST", "RED", "BAR", "BRA", "EXIT", "WARP", "SYNCS", "UT", "U", "CCTL", "MEMBAR", "NOP", "DEPBAR", "FENCE", "BSSY")
NO_RESULT += ("BSYNC", "BREAK", "CALL", "RET", "R2UR", "BMOV", "LDGDEPBAR", "LDGSTS", "ERRBAR", "NANOSLEEP", "ELECT", "YIELD")


class Pending(NamedTuple):
    """A wgmma under way: its line, the registers it reads as A, those of its accumulators."""

    address: str
    operand: frozenset[int]
    accumulators: frozenset[int]


class Instruction(NamedTuple):
    address: str
    predicated: bool
    opcode: str
    operands: tuple[str, ...]
    target: str

    @property
    def is_wgmma(self) -> bool:
        return self.opcode.startswith(("HGMMA", "IGMMA", "QGMMA"))

    def written(self) -> frozenset[int]:
        """General registers."""
        if self.is_wgmma:
            columns = int(re.match(r"\wGMMA\.64x(\d+)x", self.opcode).group(1))
            is_wide = ".F32" in self.opcode or self.opcode.startswith("IGMMA")
            return _registers(self.operands[0], columns // (2 if is_wide else 4))
        if not self.operands or self.opcode.startswith(NO_RESULT):
            return frozenset()
        first = self.operands[0]
        if re.match(r"U?P(T|\d)", first) and len(self.operands) > 1:  # a predicate comes first: LDS.128 has none, VOTE has
            first = self.operands[1] if self.opcode.startswith(("VOTE", "ATOM", "SHFL", "MATCH", "IADD3")) else ""
        return _registers(first, _width(self.opcode))

    def pending(self) -> Pending:
        return Pending(self.address, _registers(self.operands[1], 4), self.written())


def disassemble(cubin: bytes, folder: Path) -> str:
    """Raises FileNotFoundError where Triton has brought no disassembler."""
    import triton

    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    return subprocess.run([tool, "-c", path], capture_output=True, text=True, check=True).stdout


def hazards(sass: str) -> tuple[int, list[str]]:
    """(wgmmas with an operand in registers, what writes registers of one that is under way)"""
    code, labels = _parse(sass)
    found: set[str] = set()
    seen = set()
    # Where, groups under way, the group that is being begun. From every label: what is reached through a table of jumps, too.
    states: list[tuple] = [(at, (), ()) for at in {0, *labels.values()}]
    while states:
        at, groups, current = state = states.pop()
        if state in seen or at >= len(code):
            continue
        seen.add(state)
        each = code[at]
        if each.opcode.startswith("WARPGROUP.DEPBAR"):
            kept = int(each.operands[1], 0)
            groups = groups[max(0, len(groups) - kept) :] if kept else ()
        written = each.written()
        for pending in (p for group in (*groups, current) for p in group):
            owned = pending.operand if each.is_wgmma else pending.operand | pending.accumulators
            if registers := sorted(written & owned):
                found.add(f"{each.address} {each.opcode} writes {registers} of {pending.address}")
        if each.is_wgmma:
            current = (*current, each.pending())
            if "gsb0" in each.operands:
                groups, current = (*groups, current), ()
        if each.target and each.opcode.startswith("BRA"):
            states.append((labels[each.target], groups, current))
        if each.predicated or not each.opcode.startswith(("BRA", "EXIT", "RET")):
            states.append((at + 1, groups, current))
    return sum(each.is_wgmma and bool(each.pending().operand) for each in code), sorted(found)


def _parse(sass: str) -> tuple[list[Instruction], dict[str, int]]:
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := LABEL.match(line.strip()):
            labels[label.group(1)] = len(code)
        if found := INSTRUCTION.search(line):
            address, predicate, opcode, rest = found.groups()
            operands = tuple(operand.strip() for operand in rest.split(",")) if rest else ()
            target = TARGET.search(rest)
            # `BRA P0, target` and `BRA.DIV` fall through, too
            falls = bool(predicate) or (opcode.startswith("BRA") and (len(operands) > 1 or "." in opcode))
            code.append(Instruction(address, falls, opcode, operands, target.group(1) if target else ""))
    return code, labels


def _registers(operand: str, count: int) -> frozenset[int]:
    found = re.match(r"R(\d+)(?:\.\w+)*$", operand)
    return frozenset(range(int(found.group(1)), int(found.group(1)) + count)) if found else frozenset()


def _width(opcode: str) -> int:
    if ".128" in opcode or (opcode.startswith("LDSM") and opcode.endswith(".4")):
        return 4
    return 2 if ".64" in opcode or ".WIDE" in opcode or (opcode.startswith("LDSM") and opcode.endswith(".2")) else 1

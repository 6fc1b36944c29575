"""PTX text as a list of instructions.

    @!%p1 add.s32 %r3, %r1, 7;   ->   Instruction(guard=(2, True), parts=["add", "s32"],
                                                  operands=["%r3", "%r1", "7"])

Source: PTX ISA 8.8, chapters 4 and 5.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

# Bytes of each type.
WIDTHS = {f"{kind}{bits}": bits // 8 for kind in "busf" for bits in (8, 16, 32, 64)}
WIDTHS |= {"bf16": 2, "bf16x2": 4, "f16x2": 4, "tf32": 4, "e4m3x2": 2, "e5m2x2": 2}

_STATEMENT = re.compile(
    r"\s*(?:(?P<label>\$?\w+):"
    r"|(?P<brace>[{}])"
    r"|\.(?P<directive>reg|loc|pragma|file)\s(?P<rest>[^;\n]*);?"
    r"|(?P<code>[^;{}]*(?:\{[^;{}]*\}[^;{}]*)*);)"
)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,{}\[\]]+")
_NAME = re.compile(r"(?<![\w.$%])[%$\w]+(?![\w.])")


class Unsupported(NotImplementedError):
    """The PTX uses something that this emulator does not have; the kernel may be right."""


@dataclass
class Instruction:
    """One instruction."""

    text: str
    parts: list[str]  # the opcode split at its dots
    operands: list[str]  # a vector "{..}" and an address "[..]" are one each
    guard: tuple[int, bool] | None  # (predicate register, negated)

    @property
    def name(self) -> str:
        return self.parts[0]

    @property
    def kind(self) -> str:
        return self.parts[-1]


@dataclass
class Kernel:
    """A parsed entry function."""

    name: str = ""
    params: dict[str, int] = field(default_factory=dict)  # name -> offset
    registers: dict[str, int] = field(default_factory=dict)  # name -> index
    widths: list[int] = field(default_factory=list)  # bytes of a register; predicate: 0
    labels: dict[str, int] = field(default_factory=dict)  # name -> next instruction
    instructions: list[Instruction] = field(default_factory=list)
    shared_names: set[str] = field(default_factory=set)  # of shared memory, all at address 0
    param_bytes: int = 0

    def add_register(self, name: str, width: int) -> None:
        self.registers[name] = len(self.widths)
        self.widths.append(width)


def vector(operand: str) -> list[str]:
    """The members of "{a, b}", or of a single operand."""
    return [part.strip() for part in operand.strip("{} ").split(",")]


def parse(text: str) -> Kernel:
    """Parse the first entry function of a PTX module; SyntaxError, or `Unsupported`."""
    text = re.sub(r"/\*.*?\*/", "", re.sub(r"//[^\n]*", "", text), flags=re.S)
    text = re.sub(r"\.section.*", "", text, flags=re.S)
    head, _, entry = text.partition(".entry")
    header, _, body = entry.partition("{")
    kernel = Kernel(name=header.split("(")[0].strip())
    kernel.shared_names = set(re.findall(r"\.shared[^;]*?\s(\w+)\[", head))
    _parse_params(kernel, header)
    _parse_body(kernel, body.rsplit("}", 1)[0])
    return kernel


def _parse_params(kernel: Kernel, header: str) -> None:
    offset = 0
    for declaration in re.findall(r"\.param\s+([^,)]+)", header):
        kind, *_, name = declaration.split()
        by_value = re.fullmatch(r"\.align (\d+) \.b8 (\w+)\[(\d+)\]", declaration.strip())
        if by_value:
            align, name, size = int(by_value[1]), by_value[2], int(by_value[3])
        else:
            align = size = WIDTHS[kind.strip(".")]
        offset = -(-offset // align) * align
        kernel.params[name] = offset
        offset += size
    kernel.param_bytes = offset


def _parse_body(kernel: Kernel, body: str) -> None:
    scopes: list[dict[str, str]] = []  # registers and labels of inline assembly
    at = 0
    while body[at:].strip():
        found = _STATEMENT.match(body, at)
        if not found:
            raise SyntaxError(f"{kernel.name}: {body[at : at + 80]!r}")
        at = found.end()
        if found["label"]:
            label = found["label"]
            if scopes:  # others may have one of this name
                scopes[-1][label] = label = f"{label}_{len(kernel.instructions)}"
            kernel.labels[label] = len(kernel.instructions)
        elif found["brace"] == "{":
            scopes.append({})
        elif found["brace"] == "}":
            scopes.pop()
        elif found["directive"] == "reg":
            _declare(kernel, found["rest"], scopes[-1] if scopes else None)
        elif found["code"] and found["code"].strip():
            code = " ".join(found["code"].split())
            for scope in reversed(scopes):
                code = _NAME.sub(lambda m, scope=scope: scope.get(m[0], m[0]), code)
            kernel.instructions.append(_instruction(kernel, code))


def _declare(kernel: Kernel, rest: str, scope: dict[str, str] | None) -> None:
    kind, names = rest.split(None, 1)
    width = 0 if kind == ".pred" else WIDTHS[kind[1:]]
    for name in names.replace(" ", "").split(","):
        many = re.fullmatch(r"(.*)<(\d+)>", name)
        for one in [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name]:
            if scope is not None:
                scope[one] = one = f"{one}_{len(kernel.widths)}"
            kernel.add_register(one, width)


def _instruction(kernel: Kernel, code: str) -> Instruction:
    guard = None
    text = code
    if code[0] == "@":
        name, code = code[1:].split(None, 1)
        guard = (kernel.registers[name.lstrip("!")], name[0] == "!")
    opcode, _, rest = code.partition(" ")
    operands = [o.strip() for o in _OPERAND.findall(rest) if o.strip()]
    return Instruction(text, opcode.split("."), operands, guard)

"""The PTX that kernels hold as text, which Triton's interpreter takes no notice of: worked out here, instruction by instruction.

Source of what each does: PTX ISA 8.x.
"""

import inspect
import re

import pytest
import torch

from quire.kernels.attention import quantized_tile

E4M3, FP16 = torch.float8_e4m3fn, torch.float16
ALL = torch.arange(1 << 16)
WORD = 0xFFFFFFFF


def programs():
    """Instructions of each inline assembly of ``halve_pairs``, in order: with the instruction of sm_89, and without."""
    texts = re.findall(r'"""\{(.*?)\}"""', inspect.getsource(quantized_tile.halve_pairs.fn), re.S)
    return [[line.strip() for line in text.split(";") if line.strip()] for text in texts]


def widened(halves):
    """The bits of e4m3x2 numbers as those of f16x2 ones."""
    both = [(halves >> shift & 0xFF).to(torch.uint8).view(E4M3).to(FP16) for shift in (0, 8)]
    low, high = (half.view(torch.int16).long() & 0xFFFF for half in both)
    return low | high << 16


def chosen(a, b, selector):
    """prmt.b32: byte i of the result is the byte of b:a that nibble i of the selector names."""
    both = a | b << 32
    return sum((both >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i for i in range(4))


def looked_up(a, b, c, table):
    """lop3.b32: bit by bit, the bit of the table at 4 a + 2 b + c."""
    found = torch.zeros_like(a)
    for i in range(8):
        if table >> i & 1:
            terms = (a if i & 4 else ~a, b if i & 2 else ~b, c if i & 1 else ~c)
            found |= terms[0] & terms[1] & terms[2]
    return found & WORD


def run(program, word):
    """$0 and $1 of a program for the words $2, int64 that hold 32 bits."""
    registers = {"$2": word}

    def value(name):
        return registers[name] if name in registers else torch.tensor(int(name, 0))

    for line in program:
        name, rest = line.split(None, 1)
        if name == ".reg":
            continue
        if name == "mov.b32":
            low, high, source = re.match(r"\{(\w+), (\w+)\}, (\S+)", rest).groups()
            registers[low], registers[high] = value(source) & 0xFFFF, value(source) >> 16
            continue
        target, *operands = rest.split(", ")
        given = [value(operand) for operand in operands]
        registers[target] = {
            "cvt.rn.f16x2.e4m3x2": widened,
            "prmt.b32": lambda a, b, c: chosen(a, b, int(c)),
            "lop3.b32": lambda a, b, c, table: looked_up(a, b, c, int(table)),
            "shl.b32": lambda a, b: a << b & WORD,
            "shr.b32": lambda a, b: a >> b,
            "and.b32": lambda a, b: a & b,
        }[name](*given)
    return registers["$0"], registers["$1"]


@pytest.mark.parametrize("hardware", [True, False])
def test_pairs_of_quantized_values_come_apart(hardware):
    """For all pairs, beside another one above and below: even channels and odd ones of two rows, as fp16, without hardware over 2^8."""
    with_instruction, by_hand = programs()
    pairs = ALL, ALL.roll(12345)
    even, odd = run(with_instruction if hardware else by_hand, pairs[0] | pairs[1] << 16)
    for got, shift in (even, 0), (odd, 8):
        for row, pair in enumerate(pairs):
            quantized = pair >> shift & 0xFF
            numbers = (got >> 16 * row & 0xFFFF).to(torch.int16).view(FP16).float()
            want = quantized.to(torch.uint8).view(E4M3).float()
            nan = want.isnan()
            if hardware:
                assert numbers[nan].isnan().all()
            else:
                want = want / 256
            assert numbers[~nan].equal(want[~nan])
    assert nan.sum() == 2 * 256

"""The bytes of GGUF's tensor types, from codes and scales as they were solved. Layouts are those that llama.cpp reads; `gguf.quants` decodes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bakron.errors import RecipeError
from bakron.export.checkpoint import Linear, check_codes, held_scale

SUPER = 256


@dataclass(frozen=True)
class BlockType:
    """A tensor type.

    Attributes:
        encode: From (module name, linear) to its bytes, uint8 `[m, bytes of a row]`.
        bits: Stored bits per weight, scales included.
        file_type: Name of the `general.file_type` that says it.
    """

    encode: Callable[[str, Linear], Tensor]
    bits: float
    file_type: str


def q4_0(module: str, linear: Linear) -> Tensor:
    """32 inputs: float16 d, 16 bytes of two codes q + 8 (input i low, input i + 16 high). A weight is `d q`."""
    d = _scales(module, linear, 32)
    return _join(_bytes(d), _nibbles(linear.codes.reshape(*d.shape, 32) + 8))


def q4_1(module: str, linear: Linear) -> Tensor:
    """32 inputs: float16 d and m, 16 bytes of two codes. A weight is `d q + m`, m = -d zero."""
    d = _scales(module, linear, 32)
    zero = _spread(linear.grid.zero, linear.codes.shape[1], 32)
    least = -d.float() * zero
    if not torch.equal(least.half().float(), least):
        raise RecipeError(
            f"zero points of {module} whose product with the scale float16 cannot hold", do="Quantize again with --gguf-type q4_1"
        )
    return _join(_bytes(d), _bytes(least.half()), _nibbles(linear.codes.reshape(*d.shape, 32)))


def q8_0(module: str, linear: Linear) -> Tensor:
    """32 inputs: float16 d, 32 signed bytes q. A weight is `d q`."""
    d = _scales(module, linear, 32)
    return _join(_bytes(d), linear.codes.reshape(*d.shape, 32).to(torch.int8).view(torch.uint8))


def q2_k(module: str, linear: Linear) -> Tensor:
    """256 inputs: 16 bytes of a scale and a minimum of 4 bits each, 64 of pairs of bits, float16 d and e. A weight is `d s q - e m`, q from 0 to 3."""
    check_codes(module, linear, offsets=True)
    d, s = _double(module, linear.grid.scale, linear, 15)
    e, m = _double(module, -linear.grid.offset, linear, 15, least=0)
    u = linear.codes.reshape(*d.shape, 2, 4, 32)
    pairs = sum(u[..., k, :] << (2 * k) for k in range(4))
    return _join(_byte(s | m << 4), _byte(pairs.flatten(-2)), _bytes(d), _bytes(e))


def q4_k(module: str, linear: Linear) -> Tensor:
    """256 inputs: float16 d and e, 8 scales and 8 minima of 6 bits each, 128 bytes of nibbles. A weight is `d s q - e m`, q from 0 to 15."""
    check_codes(module, linear, offsets=True)
    d, s = _double(module, linear.grid.scale, linear, 63, size=32)
    e, m = _double(module, -linear.grid.offset, linear, 63, least=0, size=32)
    first = [x[..., :4] | (x[..., 4:] >> 4) << 6 for x in (s, m)]
    last = (s[..., 4:] & 15) | (m[..., 4:] & 15) << 4
    u = linear.codes.reshape(*d.shape, 4, 2, 32)
    nibbles = u[..., 0, :] | u[..., 1, :] << 4
    return _join(_bytes(d), _bytes(e), _byte(first[0]), _byte(first[1]), _byte(last), _byte(nibbles.flatten(-2)))


def q3_k(module: str, linear: Linear) -> Tensor:
    """256 inputs: 32 bytes of high bits, 64 of low pairs of bits, 16 scales of 6 bits, float16 d. A weight is `d (s - 32) q`, q from -4 to 3."""
    check_codes(module, linear)
    d, s = _double(module, linear.grid.scale, linear, 31)
    u = (linear.codes + 4).reshape(*d.shape, 2, 4, 32)  # halves of 128, quarters of 32
    low = sum((u[..., k, :] & 3) << (2 * k) for k in range(4))
    high = sum((u[..., h, k, :] >> 2) << (4 * h + k) for h in range(2) for k in range(4))
    s = s + 32
    first = (s[..., :8] & 15) | (s[..., 8:] & 15) << 4
    second = sum((s[..., 4 * k : 4 * k + 4] >> 4) << (2 * k) for k in range(4))
    return _join(_byte(high), _byte(low.flatten(-2)), _byte(first), _byte(second), _bytes(d))


def q6_k(module: str, linear: Linear) -> Tensor:
    """256 inputs: 128 bytes of low nibbles, 64 of high pairs of bits, 16 signed bytes of scales, float16 d. A weight is `d s q`, q from -32 to 31."""
    check_codes(module, linear)
    d, s = _double(module, linear.grid.scale, linear, 127)
    u = (linear.codes + 32).reshape(*d.shape, 2, 4, 32)
    low = (u[..., :2, :] & 15) | (u[..., 2:, :] & 15) << 4
    high = sum((u[..., k, :] >> 4) << (2 * k) for k in range(4))
    return _join(_byte(low.flatten(-3)), _byte(high.flatten(-2)), _byte(s), _bytes(d))


TYPES = {
    "q4_0": BlockType(q4_0, 4.5, "MOSTLY_Q4_0"),
    "q4_1": BlockType(q4_1, 5.0, "MOSTLY_Q4_1"),
    "q8_0": BlockType(q8_0, 8.5, "MOSTLY_Q8_0"),
    "q2_k": BlockType(q2_k, 2.625, "MOSTLY_Q2_K"),
    "q3_k": BlockType(q3_k, 3.4375, "MOSTLY_Q3_K_S"),
    "q4_k": BlockType(q4_k, 4.5, "MOSTLY_Q4_K_S"),
    "q6_k": BlockType(q6_k, 6.5625, "MOSTLY_Q6_K"),
}


def _spread(per_group: Tensor, n: int, size: int) -> Tensor:
    """Something per group as something per `size` inputs, `[m, n / size]`."""
    return per_group.repeat_interleave(n // size // per_group.shape[1], 1)


def _scales(module: str, linear: Linear, size: int) -> Tensor:
    """float16 scale of every `size` inputs, `[m, n / size]`.

    Raises:
        RecipeError: float16 cannot hold one.
        OutputError: Codes outside their grid.
    """
    check_codes(module, linear)
    return _spread(held_scale(module, linear.grid.scale, torch.float16), linear.codes.shape[1], size)


def _double(module: str, numbers: Tensor, linear: Linear, most: int, least: int = 1, size: int = 16) -> tuple[Tensor, Tensor]:
    """Numbers per group as a float16 per 256 inputs times whole numbers from `least` to `most`: `[m, n / 256]` and `[m, n / 256, 256 / size]`.

    The whole number of the largest is found by trial: the first that makes every other a multiple.

    Raises:
        RecipeError: Numbers that cannot be taken apart like that.
    """
    blocks = _spread(numbers.float(), linear.codes.shape[1], size).unflatten(1, (-1, SUPER // size))
    flat = blocks.reshape(-1, SUPER // size)
    d, whole = torch.zeros(len(flat)), torch.zeros_like(flat)
    left = flat.any(1).nonzero()[:, 0]  # what is zero throughout is zero times zero
    for k in range(1, most + 1):
        if not len(left):
            break
        unit = (flat[left].amax(1) / k).half().float()
        times = (flat[left] / unit[:, None]).round_()
        fits = ((times * unit[:, None] == flat[left]) & (times >= least) & (times <= most)).all(1)
        d[left[fits]], whole[left[fits]] = unit[fits], times[fits]
        left = left[~fits]
    if not len(left):
        return d.half().view(blocks.shape[:2]), whole.to(torch.int32).view(blocks.shape)
    raise RecipeError(
        f"scales of {module} that are no whole multiples, up to {most}, of one float16 for every 256 inputs",
        do="Quantize again with this --gguf-type",
    )


def _nibbles(codes: Tensor) -> Tensor:
    return _byte(codes[..., :16] | codes[..., 16:] << 4)


def _byte(numbers: Tensor) -> Tensor:
    return (numbers & 255).to(torch.uint8)


def _bytes(halves: Tensor) -> Tensor:
    return halves.contiguous()[..., None].view(torch.uint8)


def _join(*parts: Tensor) -> Tensor:
    return torch.cat(parts, -1).flatten(1).contiguous()

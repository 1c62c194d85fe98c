"""crc32 of parts of a file, put together to that of the whole, so that several threads and processes can share it."""

from __future__ import annotations

_POLYNOMIAL = 0xEDB88320
"""Of crc32, its coefficients from the lowest bit on: bit 31 is x^0."""
_ONE, _X = 1 << 31, 1 << 30


def combine_crc32(first: int, second: int, second_bytes: int) -> int:
    """crc32 of two pieces of data, one behind the other, from that of each and the length of the second.

    As crc32_combine() of zlib does, which Python has no name for: the first is moved along by multiplying it, as a
    polynomial over two elements, with x^(8 * second_bytes).
    """
    return _multiply(first, _power_of_x(8 * second_bytes)) ^ second


def _power_of_x(exponent: int) -> int:
    result, square = _ONE, _X
    while exponent:
        if exponent & 1:
            result = _multiply(result, square)
        square = _multiply(square, square)
        exponent >>= 1
    return result


def _multiply(a: int, b: int) -> int:
    """The product of two polynomials, modulo that of crc32."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product

"""Orthogonal matrices that spread every coordinate over all others, made of Hadamard matrices."""

from __future__ import annotations

import torch

from halfbyte.errors import HalfbyteError


def hadamard(size: int, *, seed: int = 0, device: torch.device | None = None) -> torch.Tensor:
    """An orthogonal matrix ``[size, size]``, fp64, entries about 1/sqrt(size).

    For ``size`` = 2^k m with m = 1 or a Paley size (12, 20, 28, 36, 76, ...) a Hadamard matrix over sqrt(size): the
    Kronecker product of Sylvester's of size 2^k with Paley's of size m. For other sizes, Sylvester's for the largest
    power of two with a random orthogonal matrix of the odd part, which ``seed`` decides.
    Source: Ashkboos et al., "QuaRot", 2024, section 3; Paley, "On orthogonal matrices", 1933.
    Errors: a size below one.
    """
    if size < 1:
        raise HalfbyteError(f"a rotation of size {size} does not exist; accepted: 1 and above")
    inner = _inner(size, seed)
    return torch.kron(_sylvester(size // len(inner)), inner).to(device)


def random_hadamard(size: int, seed: int, *, device: torch.device | None = None) -> torch.Tensor:
    """:func:`hadamard` after random signs of the coordinates, diag(signs) H, both of ``seed``; fp64."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(2, (size, 1), generator=generator, dtype=torch.float64) * 2 - 1
    return hadamard(size, seed=seed, device=device).mul_(signs.to(device))


def _inner(size: int, seed: int) -> torch.Tensor:
    """The orthogonal factor of ``size`` that is not Sylvester's, as small as it can be, fp64."""
    power = size & -size
    odd = size // power
    if odd == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    sizes = (odd << shift for shift in range(power.bit_length()))
    known = next((inner for inner in sizes if _paley_prime(inner) is not None), None)
    return _random_orthogonal(odd, seed) if known is None else _paley(known) / known**0.5


def _paley_prime(size: int) -> int | None:
    """The prime q behind Paley's matrix of ``size``: q + 1 with q = 3 mod 4, or 2 (q + 1) with q = 1 mod 4."""
    if size % 4:
        return None
    if _is_prime(size - 1):
        return size - 1
    half = size // 2 - 1
    return half if half % 4 == 1 and _is_prime(half) else None


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


def _paley(size: int) -> torch.Tensor:
    """Paley's Hadamard matrix, entries +1 and -1, fp64."""
    prime = _paley_prime(size)
    assert prime is not None
    residues = torch.full((prime,), -1.0, dtype=torch.float64)
    residues[torch.arange(prime).square() % prime] = 1.0
    residues[0] = 0.0
    index = torch.arange(prime)
    bordered = torch.ones(prime + 1, prime + 1, dtype=torch.float64)
    bordered[0, 0] = 0.0
    bordered[1:, 1:] = residues[(index[:, None] - index) % prime]
    eye = torch.eye(prime + 1, dtype=torch.float64)
    if prime % 4 == 3:
        bordered[1:, 0] = -1.0
        return bordered + eye
    plus, minus = torch.tensor([[1.0, 1.0], [1.0, -1.0]]), torch.tensor([[1.0, -1.0], [-1.0, -1.0]])
    return torch.kron(bordered, plus.double()) + torch.kron(eye, minus.double())


def _sylvester(size: int) -> torch.Tensor:
    """Sylvester's Hadamard matrix of a power of two over sqrt(``size``), fp64."""
    index = torch.arange(size)
    common = index[:, None] & index
    parity = torch.zeros_like(common)
    while bool(common.any()):
        parity ^= common & 1
        common >>= 1
    return (1.0 - 2.0 * parity.double()) / size**0.5


def _random_orthogonal(size: int, seed: int) -> torch.Tensor:
    """Uniformly distributed: the Q of a Gaussian matrix's QR with a positive diagonal in R, fp64."""
    generator = torch.Generator().manual_seed(seed)
    q, r = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    return (q * r.diagonal().sign()).contiguous()

"""Values that broke tools of this kind, as hypothesis strategies."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from halfbyte.formats.spec import TensorFormat
from halfbyte.schemes import PRESETS

SUBNORMAL = 1e-41
VALUES = (
    0.0,
    -0.0,
    SUBNORMAL,
    1e-38,
    1e-37,
    1e-30,
    2.0**-9,
    0.01,
    0.5,
    1.0,
    6.0,
    447.0,
    448.0,
    464.0,
    480.0,
    3e4,
    1e30,
)
FORMATS: dict[str, TensorFormat] = {
    **{name: scheme.weights.with_scale("bf16") for name, scheme in PRESETS.items()},
    "w4a8-f16": TensorFormat("int4", "group", 32, scale="f16"),
    "w4a16-asym-f32": TensorFormat("int4", "group", 32, symmetric=False, scale="f32"),
    "int2": TensorFormat("int2", "group", 16, scale="f32"),
    "int3-asym": TensorFormat("int3", "channel", symmetric=False, scale="bf16"),
    "e5m2": TensorFormat("e5m2", "channel", scale="f32"),
    "small-blocks": TensorFormat("e4m3", "block", block_shape=(3, 5), scale="f32"),
    "int4-two-level": TensorFormat("int4", "group", 32, scale="e4m3", outer="channel"),
}


@st.composite
def weights(draw: st.DrawFn, rows: int = 3, columns: int = 128) -> torch.Tensor:
    """fp32 ``[rows, columns]``: each row all-equal, one-sided, sparse, or a wild mix of magnitudes."""
    lines = []
    for _ in range(rows):
        kind = draw(st.sampled_from(["equal", "one-sided", "sparse", "wild", "normal"]))
        seed = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
        value = draw(st.sampled_from(VALUES)) * draw(st.sampled_from([1.0, -1.0]))
        if kind == "equal":
            line = torch.full((columns,), value)
        elif kind == "one-sided":
            line = torch.rand(columns, generator=seed) * value
        elif kind == "sparse":
            line = torch.zeros(columns)
            line[draw(st.integers(0, columns - 1))] = value
        elif kind == "wild":
            pool = torch.tensor([*VALUES, *(-v for v in VALUES)])
            line = pool[torch.randint(len(pool), (columns,), generator=seed)]
        else:
            line = torch.randn(columns, generator=seed) * abs(value)
        lines.append(line)
    return torch.stack(lines)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, so that NaN and the sign of zero count in comparisons."""
    return tensor.contiguous().view(torch.uint8)

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from halfbyte.errors import HalfbyteError, NonFiniteError
from halfbyte.formats.floats import decode_e2m1, decode_e8m0, encode_e2m1, encode_e8m0, encode_float8

ML_DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}


def finite_values(element: str) -> np.ndarray:
    codes = np.arange(16 if element == "e2m1" else 256, dtype=np.uint8)
    values = codes.view(ML_DTYPES[element]).astype(np.float32)
    return np.unique(values[np.isfinite(values)])


def probes(element: str) -> np.ndarray:
    """Every element, every midpoint of two neighbours, and the fp32 numbers on both sides of each."""
    values = finite_values(element)
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2, [-0.0]]).astype(np.float32)
    return np.concatenate(
        [points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(-np.inf))]
    )


def saturated(x: np.ndarray, element: str) -> np.ndarray:
    return np.clip(x, -LARGEST[element], LARGEST[element]).astype(ML_DTYPES[element]).view(np.uint8)


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_float8_equals_ml_dtypes_at_every_element_and_midpoint(element: str) -> None:
    x = probes(element)
    codes = encode_float8(torch.from_numpy(x), element)
    np.testing.assert_array_equal(codes.view(torch.uint8).numpy(), saturated(x, element))


def test_e2m1_equals_ml_dtypes_at_every_element_and_midpoint() -> None:
    x = probes("e2m1")
    np.testing.assert_array_equal(encode_e2m1(torch.from_numpy(x)).numpy(), saturated(x, "e2m1"))


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_float8_saturates_infinity_and_keeps_nan(element: str) -> None:
    x = torch.tensor([464.0, 1e30, torch.inf, -torch.inf, torch.nan])
    values = encode_float8(x, element).float()
    assert values[2:4].tolist() == [LARGEST[element], -LARGEST[element]]
    assert values[1] == LARGEST[element]
    assert values[4].isnan()
    assert values[0] == 448.0  # E4M3's largest; in E5M2 464 lies between 448 and 512


def test_e2m1_codes_are_the_tables() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    expected = codes.numpy().view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(decode_e2m1(codes).numpy(), expected)
    assert torch.equal(encode_e2m1(decode_e2m1(codes)), codes)  # the sign of zero included


def test_e2m1_saturates_infinity_and_refuses_nan() -> None:
    assert encode_e2m1(torch.tensor([torch.inf, -torch.inf, 7.0])).tolist() == [7, 15, 7]
    with pytest.raises(NonFiniteError, match="NaN"):
        encode_e2m1(torch.tensor([1.0, torch.nan]))


def test_e8m0_equals_ml_dtypes_for_every_code() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    expected = codes.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    np.testing.assert_array_equal(decode_e8m0(codes).numpy(), expected)
    assert torch.equal(encode_e8m0(decode_e8m0(codes)), codes)


def test_e8m0_rounds_to_the_nearest_power_of_two() -> None:
    powers = 2.0 ** torch.arange(-126, 127, dtype=torch.float64).float()
    for factor, up in [(1.0, 0), (1.25, 0), (1.4999, 0), (1.5, 1), (1.75, 1)]:
        assert torch.equal(encode_e8m0(powers * factor).int(), torch.arange(1, 254, dtype=torch.int32) + up)
    assert encode_e8m0(torch.tensor([0.0, 1e-45, torch.inf, 3e38, torch.nan, -1.0])).tolist() == [
        0,
        0,
        254,
        254,
        255,
        255,
    ]


def test_e8m0_refuses_signed_exponents() -> None:
    with pytest.raises(HalfbyteError, match="uint8"):
        decode_e8m0(torch.zeros(3, dtype=torch.int8))

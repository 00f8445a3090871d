from __future__ import annotations

import pytest
import torch

from halfbyte.devices import device_named, tf32_products
from halfbyte.errors import HalfbyteError

HAS_GPU = torch.cuda.is_available()


@pytest.mark.parametrize("name", ["cpu", torch.device("cpu"), "cpu:0"], ids=repr)
def test_the_cpu(name: torch.device | str) -> None:
    assert device_named(name) == torch.device("cpu")


def test_a_gpu_only_if_there_is_one() -> None:
    assert device_named("auto").type == ("cuda" if HAS_GPU else "cpu")


@pytest.mark.parametrize(
    "name", ["", "gpu", "mps", "meta", "cuda:", "cuda:-1", "cuda:x", torch.device("meta")], ids=repr
)
def test_devices_that_are_none(name: torch.device | str) -> None:
    with pytest.raises(HalfbyteError, match=r"^device '.*' is not known; accepted: auto, cpu, cuda, cuda:N$"):
        device_named(name)


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:7", torch.device("cuda")], ids=repr)
def test_no_gpu(name: torch.device | str) -> None:
    with pytest.raises(
        HalfbyteError, match=r"^device 'cuda.*': torch .* finds no CUDA GPU; accepted: cpu, auto$"
    ):
        device_named(name)


@pytest.mark.gpu
def test_a_gpu_by_its_number() -> None:
    last = torch.cuda.device_count() - 1
    assert device_named(f"cuda:{last}") == torch.device("cuda", last)
    assert device_named("cuda") == device_named("auto") == torch.device("cuda", torch.cuda.current_device())
    with pytest.raises(HalfbyteError, match=rf"^device 'cuda:{last + 1}' is not there; accepted: cuda:0"):
        device_named(f"cuda:{last + 1}")


def test_tf32_only_within_its_context() -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    with tf32_products():
        assert torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cuda.matmul.allow_tf32 == before
    with pytest.raises(RuntimeError, match="within"), tf32_products():
        raise RuntimeError("within")
    assert torch.backends.cuda.matmul.allow_tf32 == before


@pytest.mark.gpu
def test_sixteen_bits_lose_nothing_by_tf32() -> None:
    x = (
        torch.randn(512, 256, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
        .bfloat16()
        .float()
    )
    exact = (x.double().T @ x.double()).float()
    with tf32_products():
        found = x.T @ x
    assert float((found - exact).abs().max() / exact.abs().max()) < 1e-6

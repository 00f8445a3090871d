"""One token on a fixed cache, as torch says it on the CPU, against transformers and float64."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from halfbyte.kernels.cached_attention import HeadNorms, attend, rotate_and_store
from tests.kernels.attention_cases import angles, cache, exact_attention, normal, visible

BATCH, HEADS, KV_HEADS, LENGTH, HEAD = 3, 8, 2, 24, 32
SLOT = 17


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rotation_is_that_of_transformers(dtype: torch.dtype, normed: bool) -> None:
    wide = normal(BATCH, (HEADS + 2 * KV_HEADS) * HEAD + 8, dtype=dtype)
    qkv = wide[:, : (HEADS + 2 * KV_HEADS) * HEAD]
    cos, sin = angles(BATCH, HEAD, dtype)
    q_norm, k_norm = (LlamaRMSNorm(HEAD, 1e-6).to(dtype) for _ in range(2))
    for seed, norm in enumerate((q_norm, k_norm)):
        norm.weight.data.copy_(1 + 0.1 * normal(HEAD, seed=seed))
    norms = HeadNorms(q_norm.weight.detach(), k_norm.weight.detach(), 1e-6) if normed else None
    keys, values = cache(BATCH, KV_HEADS, LENGTH, HEAD, dtype)
    before = keys.clone(), values.clone()
    query = rotate_and_store(qkv, cos, sin, norms, keys, values, torch.tensor([SLOT]))

    heads = qkv.reshape(BATCH, 1, -1, HEAD)
    q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), dim=2)
    if normed:
        q, k = q_norm(q), k_norm(k)
    q, k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos[:, None], sin[:, None])
    assert torch.equal(query, q[:, :, 0])
    assert torch.equal(keys[:, :, SLOT], k[:, :, 0])
    assert torch.equal(values[:, :, SLOT], v[:, 0])
    others = torch.arange(LENGTH) != SLOT
    assert torch.equal(keys[:, :, others], before[0][:, :, others])
    assert torch.equal(values[:, :, others], before[1][:, :, others])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_is_exact(dtype: torch.dtype) -> None:
    query = normal(BATCH, HEADS, HEAD, dtype=dtype)
    keys, values = cache(BATCH, KV_HEADS, LENGTH, HEAD, dtype)
    seen = visible(BATCH, LENGTH, SLOT)
    position, arrivals = torch.tensor([SLOT]), torch.zeros(BATCH * KV_HEADS, dtype=torch.int32)
    found = attend(query, keys, values, seen, position, 0.3, arrivals)
    want = exact_attention(query, keys, values, seen, 0.3)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.double(), want, rtol=tolerance, atol=tolerance)
    assert not arrivals.any()

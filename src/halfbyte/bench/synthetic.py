"""Checkpoints that exist to be measured: headers of any size without data, and dense models full of random weights.

Both are written without holding the model: the first is a header and a hole, the second streams block by block.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

TensorSpec = tuple[str, tuple[int, ...]]
"""Dtype in safetensors spelling, shape."""

_DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
_HEADER_ALIGNMENT = 8
_BLOCK_ELEMENTS = 1 << 22
_WEIGHT_STD = 0.02


def tensor_bytes(spec: TensorSpec) -> int:
    """Bytes of one tensor."""
    dtype, shape = spec
    return _DTYPE_BYTES[dtype] * math.prod(shape)


def plan_shards(tensors: Mapping[str, TensorSpec], shards: int) -> list[dict[str, TensorSpec]]:
    """Cuts ``tensors``, in order, into ``shards`` parts of about equal bytes; no part is empty."""
    if not 1 <= shards <= len(tensors):
        raise ValueError(f"{len(tensors)} tensors cannot fill {shards} shards")
    total = sum(map(tensor_bytes, tensors.values()))
    parts: list[dict[str, TensorSpec]] = [{} for _ in range(shards)]
    part, done = 0, 0
    for left, (name, spec) in zip(range(len(tensors), 0, -1), tensors.items(), strict=True):
        full = done >= total * (part + 1) / shards
        must_move_on = left <= shards - part - 1
        if parts[part] and part < shards - 1 and (full or must_move_on):
            part += 1
        parts[part][name] = spec
        done += tensor_bytes(spec)
    return parts


def safetensors_header(tensors: Mapping[str, TensorSpec]) -> bytes:
    """Length prefix and JSON header of a safetensors file that holds ``tensors`` in order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, spec in tensors.items():
        end = offset + tensor_bytes(spec)
        header[name] = {"dtype": spec[0], "shape": list(spec[1]), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _write_json_files(
    path: Path, config: Mapping[str, Any], parts: list[dict[str, TensorSpec]]
) -> list[tuple[Path, dict[str, TensorSpec]]]:
    """config.json and, with more than one part, the index. Returns the file of each part."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    if len(parts) == 1:
        return [(path / "model.safetensors", parts[0])]
    names = [f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts))]
    weight_map = {tensor: file for file, part in zip(names, parts, strict=True) for tensor in part}
    total = sum(tensor_bytes(spec) for part in parts for spec in part.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return [(path / name, part) for name, part in zip(names, parts, strict=True)]


def write_sparse_checkpoint(
    path: Path, config: Mapping[str, Any], tensors: Mapping[str, TensorSpec], shards: int = 1
) -> None:
    """Writes a checkpoint of true headers and sizes whose data is a hole in the file (all zero bytes)."""
    for file, part in _write_json_files(path, config, plan_shards(tensors, shards)):
        header = safetensors_header(part)
        with file.open("wb") as handle:
            handle.write(header)
            handle.truncate(len(header) + sum(map(tensor_bytes, part.values())))


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of a Llama-shaped model with its own ``lm_head``. The defaults are those of an 8B model."""

    layers: int
    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    kv_heads: int = 8
    vocab: int = 32000

    def config(self) -> dict[str, Any]:
        """config.json of this model."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.hidden // self.heads,
            "vocab_size": self.vocab,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        }

    def tensors(self) -> dict[str, TensorSpec]:
        """Every tensor, BF16, in the order of the layers."""
        hidden, kv = self.hidden, self.hidden // self.heads * self.kv_heads
        found: dict[str, TensorSpec] = {"model.embed_tokens.weight": ("BF16", (self.vocab, hidden))}
        linears = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (self.intermediate, hidden),
            "mlp.up_proj": (self.intermediate, hidden),
            "mlp.down_proj": (hidden, self.intermediate),
        }
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            found[prefix + "input_layernorm.weight"] = ("BF16", (hidden,))
            found.update({f"{prefix}{name}.weight": ("BF16", shape) for name, shape in linears.items()})
            found[prefix + "post_attention_layernorm.weight"] = ("BF16", (hidden,))
        found["model.norm.weight"] = ("BF16", (hidden,))
        found["lm_head.weight"] = ("BF16", (self.vocab, hidden))
        return found

    @property
    def nbytes(self) -> int:
        return sum(map(tensor_bytes, self.tensors().values()))


def llama_of_bytes(nbytes: int) -> LlamaShape:
    """The 8B shape with as many layers as come closest to ``nbytes``, one at least."""
    fixed = LlamaShape(layers=0).nbytes
    per_layer = LlamaShape(layers=1).nbytes - fixed
    return LlamaShape(layers=max(1, round((nbytes - fixed) / per_layer)))


def _random_bf16(rng: np.random.Generator, elements: int) -> np.ndarray:
    values = rng.standard_normal(elements, dtype=np.float32)
    values *= _WEIGHT_STD
    return (values.view(np.uint32) >> np.uint32(16)).astype("<u2")


def _blocks(name: str, spec: TensorSpec, rng: np.random.Generator) -> Iterator[bytes]:
    elements = math.prod(spec[1])
    if name.endswith("norm.weight"):
        yield np.full(elements, 0x3F80, "<u2").tobytes()  # 1.0
        return
    for start in range(0, elements, _BLOCK_ELEMENTS):
        yield _random_bf16(rng, min(_BLOCK_ELEMENTS, elements - start)).tobytes()


def _write_part(handle: BinaryIO, part: Mapping[str, TensorSpec], rng: np.random.Generator) -> None:
    handle.write(safetensors_header(part))
    for name, spec in part.items():
        for block in _blocks(name, spec, rng):
            handle.write(block)


def write_dense_checkpoint(
    path: Path, shape: LlamaShape, *, seed: int = 0, shard_bytes: int = 2 << 30
) -> int:
    """Writes a Llama-shaped BF16 checkpoint of normal random weights (std 0.02, norms 1.0) and returns its bytes.

    Streams: memory stays under 64 MB whatever the size. The same seed writes the same bytes.
    """
    tensors = shape.tensors()
    parts = plan_shards(tensors, min(len(tensors), math.ceil(shape.nbytes / shard_bytes)))
    for index, (file, part) in enumerate(_write_json_files(path, shape.config(), parts)):
        with file.open("wb") as handle:
            _write_part(handle, part, np.random.default_rng([seed, index]))
    return shape.nbytes


def deepseek_v3(fp8_blocks: bool = True) -> tuple[dict[str, Any], dict[str, TensorSpec]]:
    """config.json and tensors of a 671B-parameter mixture of experts: names and sizes of DeepSeek-V3.

    61 layers and one MTP layer, 256 experts from the fourth layer on, multi-head latent attention.
    fp8_blocks: linears in E4M3 with an fp32 ``weight_scale_inv`` per 128x128 block, as published; else BF16.
    """
    hidden, heads, layers, experts, expert_size, dense_size, vocab = 7168, 128, 61, 256, 2048, 18432, 129280
    config: dict[str, Any] = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": hidden,
        "intermediate_size": dense_size,
        "moe_intermediate_size": expert_size,
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    if fp8_blocks:
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        }
    tensors: dict[str, TensorSpec] = {}

    def linear(name: str, rows: int, columns: int) -> None:
        tensors[f"{name}.weight"] = ("F8_E4M3" if fp8_blocks else "BF16", (rows, columns))
        if fp8_blocks:
            scales = (math.ceil(rows / 128), math.ceil(columns / 128))
            tensors[f"{name}.weight_scale_inv"] = ("F32", scales)

    def mlp(prefix: str, size: int) -> None:
        linear(f"{prefix}.gate_proj", size, hidden)
        linear(f"{prefix}.up_proj", size, hidden)
        linear(f"{prefix}.down_proj", hidden, size)

    def plain(name: str, *shape: int, dtype: str = "BF16") -> None:
        tensors[name] = (dtype, shape)

    plain("model.embed_tokens.weight", vocab, hidden)
    for layer in range(layers + 1):
        prefix = f"model.layers.{layer}"
        if layer == layers:  # the MTP layer brings its own embedding, norms and head
            plain(f"{prefix}.embed_tokens.weight", vocab, hidden)
            plain(f"{prefix}.enorm.weight", hidden)
            plain(f"{prefix}.hnorm.weight", hidden)
            plain(f"{prefix}.eh_proj.weight", hidden, 2 * hidden)
            plain(f"{prefix}.shared_head.norm.weight", hidden)
            plain(f"{prefix}.shared_head.head.weight", vocab, hidden)
        attention = f"{prefix}.self_attn"
        linear(f"{attention}.q_a_proj", 1536, hidden)
        plain(f"{attention}.q_a_layernorm.weight", 1536)
        linear(f"{attention}.q_b_proj", heads * 192, 1536)
        linear(f"{attention}.kv_a_proj_with_mqa", 512 + 64, hidden)
        plain(f"{attention}.kv_a_layernorm.weight", 512)
        linear(f"{attention}.kv_b_proj", heads * 256, 512)
        linear(f"{attention}.o_proj", hidden, heads * 128)
        if layer < 3:
            mlp(f"{prefix}.mlp", dense_size)
        else:
            plain(f"{prefix}.mlp.gate.weight", experts, hidden)
            plain(f"{prefix}.mlp.gate.e_score_correction_bias", experts, dtype="F32")
            mlp(f"{prefix}.mlp.shared_experts", expert_size)
            for expert in range(experts):
                mlp(f"{prefix}.mlp.experts.{expert}", expert_size)
        plain(f"{prefix}.input_layernorm.weight", hidden)
        plain(f"{prefix}.post_attention_layernorm.weight", hidden)
    plain("model.norm.weight", hidden)
    plain("lm_head.weight", vocab, hidden)
    return config, tensors

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from halfbyte.checkpoint.gguf_file import GgufFile
from halfbyte.checkpoint.gguf_tokenizer import SPLITS, save_tokenizer
from halfbyte.errors import HalfbyteError
from tests.checkpoint.gguf_files import reference_model, write_gguf
from tests.tiny import tiny_tokenizer


def _saved(folder: Path, **fields: Any) -> Any:
    """The tokenizer of a GGUF whose ``tokenizer.ggml.*`` fields are changed like this."""
    changed = {f"ggml.{name}": value for name, value in fields.items()}
    file = write_gguf(folder / "m.gguf", reference_model("llama"), tokenizer=changed)
    save_tokenizer(GgufFile(file), folder / "out", 512)
    return AutoTokenizer.from_pretrained(folder / "out")


def test_same_ids_as_the_tokenizer_that_was_written(tmp_path: Path) -> None:
    saved, original = _saved(tmp_path), tiny_tokenizer()
    for text in ("in 1990,  23 men\\n don't", "naïve 🦆 <s>user", " <|endoftext|>x</s>"):
        ids = saved(text, add_special_tokens=False).input_ids
        assert ids == original(text, add_special_tokens=False).input_ids
        assert saved.decode(ids) == text
    assert (saved.bos_token_id, saved.eos_token_id) == (256, 257)
    assert saved.model_max_length == 512
    assert saved.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


def test_merges_are_used(tmp_path: Path) -> None:
    saved = _saved(tmp_path)
    assert saved.convert_ids_to_tokens(saved("cab").input_ids) == ["c", "ab"]


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "a  2345 I'm", ["a", "Ġ", "Ġ2345", "ĠI", "'m"]),
        ("smollm", "a  2345 I'm", ["a", "ĠĠ", "2", "3", "4", "5", "ĠI", "'m"]),
        ("llama-bpe", "a  2345 I'm", ["a", "Ġ", "Ġ", "234", "5", "ĠI", "'m"]),
        ("qwen2", "a  2345 I'm", ["a", "Ġ", "Ġ", "2", "3", "4", "5", "ĠI", "'m"]),
    ],
)
def test_text_is_split_as_the_name_says(pre: str, text: str, pieces: list[str], tmp_path: Path) -> None:
    splitter = _saved(tmp_path, pre=pre).backend_tokenizer.pre_tokenizer
    assert [piece for piece, _ in splitter.pre_tokenize_str(text)] == pieces


def test_qwen_composes_unicode(tmp_path: Path) -> None:
    saved = _saved(tmp_path, pre="qwen2")
    assert saved("e\u0301").input_ids == saved("\u00e9").input_ids


def test_a_start_token_where_the_file_asks_for_one(tmp_path: Path) -> None:
    assert _saved(tmp_path, add_bos_token=True)("a").input_ids[0] == 256
    assert _saved(tmp_path, add_bos_token=False)("a").input_ids[0] != 256


def test_user_defined_tokens_stay_whole_but_are_text(tmp_path: Path) -> None:
    types = [1] * 256 + [3] * 3 + [4] * 5
    names = tiny_tokenizer().convert_ids_to_tokens(range(264))
    names[259], names[263] = "<think>", "ab"
    saved = _saved(tmp_path, token_type=types, tokens=names)
    ids = saved("x<think></s>", add_special_tokens=False).input_ids
    assert ids[1:] == [259, 257]
    assert saved.decode(ids, skip_special_tokens=True) == "x<think>"


def test_sentencepiece(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "i", "hi", "▁hi"]
    saved = _saved(
        tmp_path,
        model="llama",
        pre="default",
        tokens=tokens,
        token_type=[2, 3, 3, *[6] * 256, *[1] * 5],
        scores=[0.0] * 259 + [-1.0, -2.0, -3.0, -4.0, -5.0],
        merges=None,
        bos_token_id=1,
        eos_token_id=2,
        eot_token_id=None,
        unknown_token_id=0,
    )
    ids = saved("hi", add_special_tokens=False).input_ids
    assert saved.convert_ids_to_tokens(ids) == ["▁hi"]
    assert (saved.bos_token, saved.eos_token, saved.unk_token) == ("<s>", "</s>", "<unk>")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pre": "poro-chat"}, "'poro-chat' is not supported; supported: " + ", ".join(SPLITS)),
        ({"model": "rwkv"}, "tokenizer 'rwkv' is not supported; supported: gpt2, llama"),
        ({"model": None}, "tokenizer None is not supported"),
        ({"tokens": ["a", "b", "a"]}, "eos_token_id is 257, but there are 3 tokens|bos_token_id is 256"),
        ({"merges": ["y z"]}, "'gpt2' tokenizer cannot be rebuilt .*yz"),
    ],
)
def test_what_cannot_be_rebuilt_is_named(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(HalfbyteError, match=message):
        _saved(tmp_path, **fields)


def test_a_token_twice_is_refused(tmp_path: Path) -> None:
    names = tiny_tokenizer().convert_ids_to_tokens(range(264))
    names[263] = names[0]
    with pytest.raises(HalfbyteError, match="holds a token twice"):
        _saved(tmp_path, tokens=names, merges=None)

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.calibration.chat import EncodedChat, encode_chat
from halfbyte.calibration.masks import MASKED_ROLES, token_reasons
from halfbyte.calibration.records import parse
from halfbyte.calibration.rows import Row
from halfbyte.errors import HalfbyteError
from tests.calibration.data_files import chat_row, chat_tokenizer
from tests.tiny import tiny_tokenizer


def encode(
    row: dict[str, Any], template: str | None = None, masked: tuple[str, ...] = MASKED_ROLES
) -> EncodedChat:
    tokenizer = chat_tokenizer(template) if template else chat_tokenizer()
    return encode_chat(tokenizer, parse(Row("data.jsonl line 1", row), len(tokenizer)), masked)


def counted(encoded: EncodedChat) -> str:
    """The text that counts, parts that others separate joined by ``|``."""
    tokenizer = tiny_tokenizer()
    parts: list[list[int]] = [[]]
    for token, reason in zip(encoded.ids, encoded.reasons, strict=True):
        if reason:
            parts.append([])
        else:
            parts[-1].append(token)
    return "|".join(tokenizer.decode(part) for part in parts if part)


def test_the_model_sees_what_the_template_writes_in_one_piece() -> None:
    encoded = encode(chat_row("Hi", "Yes"))
    tokenizer = chat_tokenizer()
    assert tokenizer.decode(encoded.ids) == "<s><user>Hi</s>\n<assistant>Yes</s>\n"
    expected = tokenizer("<s><user>Hi</s>\n<assistant>Yes</s>\n", add_special_tokens=False)["input_ids"]
    assert encoded.ids == expected


def test_contents_of_users_and_assistants_count_and_nothing_else() -> None:
    row = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "developer", "content": "Use tools."},
            {"role": "user", "content": "Weather?"},
            {"role": "tool", "content": "rain"},
            {"role": "assistant", "content": "Rain."},
        ],
        "tools": [{"name": "weather", "description": "Weather?"}],
    }
    encoded = encode(row)
    assert counted(encoded) == "Weather?|Rain."
    by_reason = {reason: encoded.reasons.count(reason) for reason in set(encoded.reasons)}
    assert by_reason["role:system"] == len("Be brief.")
    assert by_reason["role:developer"] == len("Use tools.")
    assert by_reason["role:tool"] == len("rain")
    assert by_reason[""] == len("Weather?Rain.")
    assert sum(by_reason.values()) == len(encoded.ids)


def test_roles_can_be_chosen() -> None:
    row = {"messages": [{"role": "system", "content": "Be brief."}, *chat_row("Hi", "Yes")["messages"]]}
    assert counted(encode(row, masked=("user",))) == "Be brief.|Yes"
    assert counted(encode(row, masked=())) == "Be brief.|Hi|Yes"


@pytest.mark.parametrize("first", ["user", "<", "</s>", "s>", "a", "assistant", "<user>"])
def test_a_content_that_the_template_also_writes_is_found_where_it_is(first: str) -> None:
    encoded = encode(chat_row(first, "user"))
    ids = list(chat_tokenizer()(first, add_special_tokens=False)["input_ids"])
    opening = len("<user>") + 1
    assert encoded.ids[opening : opening + len(ids)] == ids
    assert [i for i, reason in enumerate(encoded.reasons) if not reason] == [
        *range(opening, opening + len(ids)),
        *range(len(encoded.ids) - len("user") - 2, len(encoded.ids) - 2),
    ]


def test_spans_are_characters_of_the_content_before_it_is_trimmed() -> None:
    row = {"messages": [{"role": "user", "content": "  käse und brot ", "mask": [[0, 4], [12, 16]]}]}
    encoded = encode(row)
    assert counted(encoded) == "se und b"
    assert encoded.reasons.count("span") == len("kä".encode()) + len("rot")


def test_a_message_of_weight_zero_does_not_count() -> None:
    row = chat_row("Hi", "No", "Hm", "Yes")
    row["messages"][1]["weight"] = 0
    encoded = encode(row)
    assert counted(encoded) == "Hi|Hm|Yes"
    assert encoded.reasons.count("weight") == 2


def test_sharegpt_and_text_parts_are_messages_too() -> None:
    sharegpt = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]}
    parts = chat_row("Hi", "Yes")
    parts["messages"][0]["content"] = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    assert encode(sharegpt) == encode(parts) == encode(chat_row("Hi", "Yes"))


def test_what_a_template_rewrites_does_not_count_and_is_told() -> None:
    rewriting = "{% for m in messages %}[{{ m.role }}]{{ m.content.split('</think>')[-1] }}{% endfor %}"
    encoded = encode(chat_row("Q", "<think>hm</think>A", "R", "B"), rewriting)
    assert counted(encoded) == "Q|R|B"
    assert encoded.lost == 1


def test_a_template_that_looks_at_contents_still_gives_their_places() -> None:
    looking = (
        "{% for m in messages %}{% if m.content == 'x' %}(short){% endif %}[{{ m.content }}]{% endfor %}"
    )
    assert counted(encode(chat_row("x", "long"), looking)) == "x|long"


@pytest.mark.parametrize("lead", ["", "\n", "  {% if true %}x{% endif %}"])
def test_dates_do_not_depend_on_the_day(lead: str) -> None:
    dated = lead + "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y, %B') }}{% endif %}"
    encoded = encode(chat_row("Hi"), dated + "{{ messages[0].content }}")
    before = chat_tokenizer(lead + "{{ '' }}").apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False
    )
    assert chat_tokenizer().decode(encoded.ids) == before + "01 Jan 2025, JanuaryHi"
    assert counted(encoded) == "Hi"


def test_an_assistant_that_only_calls_tools_has_no_content() -> None:
    row = chat_row("Hi", "")
    row["messages"][1] = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    encoded = encode(row)
    assert counted(encoded) == "Hi"
    assert encoded.lost == 0


def test_templates_that_refuse_and_tokenizers_without_one_are_errors_that_name_the_row() -> None:
    with pytest.raises(
        HalfbyteError, match=r"^data\.jsonl line 1: the tokenizer's chat template fails: roles"
    ):
        encode(chat_row("Hi"), "{{ raise_exception('roles must alternate') }}")
    plain = tiny_tokenizer()
    chat = parse(Row("data.jsonl line 1", chat_row("Hi")), len(plain))
    with pytest.raises(HalfbyteError, match=r"^data\.jsonl line 1: .* no chat template"):
        encode_chat(plain, chat, ())


def test_a_token_counts_if_all_of_its_characters_do() -> None:
    characters = ["template", "", "", "span", "", "role:system"]
    offsets = [(0, 1), (0, 2), (1, 3), (2, 4), (3, 6), (4, 4), (5, 5), (6, 6)]
    assert token_reasons(offsets, characters) == [
        "template",
        "template",
        "",
        "span",
        "span",
        "",
        "role:system",
        "template",
    ]


TEXTS = st.text(st.sampled_from(list("aub <>/s\n\tüé\U0001f600\ue000\ue0010")), max_size=12)


@settings(max_examples=60, deadline=None)
@given(turns=st.lists(TEXTS, min_size=1, max_size=4))
def test_every_token_of_trimmed_contents_counts_and_no_other(turns: list[str]) -> None:
    """Against the same tokens put together by hand, a content at a time."""
    tokenizer = chat_tokenizer()
    pieces = [("<s>", False)]
    for i, turn in enumerate(turns):
        pieces += [(f"<{('user', 'assistant')[i % 2]}>", False), (turn.strip(), True), ("</s>\n", False)]
    text = "".join(piece for piece, _ in pieces)
    counts = [is_content for piece, is_content in pieces for _ in piece]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    expected = [all(counts[start:stop]) for start, stop in encoded["offset_mapping"]]
    got = encode(chat_row(*turns))
    assert got.ids == encoded["input_ids"]
    assert [not reason for reason in got.reasons] == expected

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.checkpoint.headers import DTYPE_BITS, read_header
from halfbyte.checkpoint.shard_plan import Entry, plan_digest, plan_shards
from halfbyte.errors import HalfbyteError


def entries(*sizes: int) -> list[Entry]:
    return [Entry(f"t{number}", "U8", (size,)) for number, size in enumerate(sizes)]


def test_shards_are_filled_in_order() -> None:
    shards = plan_shards(entries(4, 5, 20, 1, 1), 10)
    assert [[entry.name for entry in shard.entries] for shard in shards] == [
        ["t0", "t1"],
        ["t2"],
        ["t3", "t4"],
    ]
    assert [shard.file for shard in shards] == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]


def test_from_the_first_start_on_shards_end_where_the_next_one_starts() -> None:
    shards = plan_shards(entries(9, 9, 1, 1, 1, 9, 9, 1), 10, {"t3", "t5"})
    assert [[entry.name for entry in shard.entries] for shard in shards] == [
        ["t0"],
        ["t1", "t2"],
        ["t3", "t4"],
        ["t5", "t6", "t7"],
    ]


def test_one_shard_is_the_single_file() -> None:
    assert [shard.file for shard in plan_shards(entries(4, 6), 10)] == ["model.safetensors"]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(sorted(DTYPE_BITS)), st.integers(0, 5)), min_size=1, max_size=12),
    st.integers(1, 200),
)
def test_every_plan_is_a_valid_file_of_aligned_tensors(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[str, int]], shard_bytes: int
) -> None:
    wanted = [Entry(f"t{n}", dtype, (2, 4 * size)) for n, (dtype, size) in enumerate(kinds)]
    shards = plan_shards(wanted, shard_bytes)
    assert [entry for shard in shards for entry in sorted(shard.entries, key=wanted.index)] == wanted
    folder: Path = tmp_path_factory.mktemp("plan")
    for shard in shards:
        assert len(shard.header) % 8 == 0
        (folder / shard.file).write_bytes(shard.header + bytes(shard.size - len(shard.header)))
        tensors, metadata = read_header(folder / shard.file)
        assert metadata == {"format": "pt"}
        assert {name: info.offset for name, info in tensors.items()} == shard.offsets
        for info in tensors.values():
            if DTYPE_BITS[info.dtype] >= 8:
                assert info.offset % (DTYPE_BITS[info.dtype] // 8) == 0


def test_digests_tell_plans_apart() -> None:
    plans = [plan_shards(entries(4, 6), size) for size in (5, 10)] + [plan_shards(entries(6, 4), 10)]
    digests = {plan_digest(plan, fingerprint) for plan in plans for fingerprint in ("a", "b")}
    digests |= {plan_digest(plans[0], "a", again) for again in ({"one"}, {"two"}, {"one", "two"})}
    assert len(digests) == 9
    assert plan_digest(plan_shards(entries(4, 6), 5), "a") == plan_digest(plans[0], "a")


def test_plans_that_cannot_be() -> None:
    with pytest.raises(HalfbyteError, match="'t0' would be written twice"):
        plan_shards([*entries(1, 2), *entries(1)], 10)
    with pytest.raises(HalfbyteError, match="'t': dtype 'Q4' is not known"):
        plan_shards([Entry("t", "Q4", (1,))], 10)
    with pytest.raises(HalfbyteError, match=r"'t': F4 of shape .3. fills no whole bytes"):
        plan_shards([Entry("t", "F4", (3,))], 10)
    with pytest.raises(HalfbyteError, match="no tensor to write"):
        plan_shards([], 10)

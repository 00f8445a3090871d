from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.checkpoint.name_patterns import covering_patterns
from halfbyte.matching import matches


def layers(name: str, count: int = 4) -> list[str]:
    return [name.format(number) for number in range(count)]


def test_routers_become_one_pattern_that_needs_no_prefix() -> None:
    routers = layers("model.layers.{}.mlp.gate")
    gates = layers("model.layers.{}.mlp.gate_proj")
    assert covering_patterns([*routers, "lm_head"], gates) == [r"re:.*\.mlp\.gate$", "lm_head"]


def test_the_whole_name_where_the_tail_is_not_enough() -> None:
    experts = [f"model.layers.{n}.mlp.experts.{e}.down_proj" for n in range(3) for e in range(2)]
    others = layers("model.layers.{}.mlp.shared_expert.down_proj")
    assert covering_patterns(experts, others) == [r"re:model\.layers\.\d+\.mlp\.experts\.\d+\.down_proj$"]


def test_layers_are_listed_where_only_they_tell() -> None:
    names = layers("model.layers.{}.mlp.up_proj", 12)
    assert covering_patterns(names[10:], names[:10]) == [r"re:model\.layers\.(10|11)\.mlp\.up_proj$"]
    assert covering_patterns(names[:1], names[1:]) == names[:1]


def test_names_in_one_layer_stand_as_they_are() -> None:
    experts = [f"layers.0.experts.{e}.up_proj" for e in range(4)]
    assert covering_patterns(experts[:2], experts[2:]) == experts[:2]


def test_ignoring_one_partner_of_a_fused_group_leaves_the_others() -> None:
    keys = layers("model.layers.{}.self_attn.k_proj")
    partners = [name.replace("k_proj", leaf) for name in keys for leaf in ("q_proj", "v_proj", "qk_proj")]
    assert covering_patterns(keys, partners) == [r"re:.*\.self_attn\.k_proj$"]


parts = st.sampled_from(["a", "gate", "gate_proj", "up_proj", "0", "1", "10", "x.y", "experts"])
module_names = st.lists(st.lists(parts, min_size=1, max_size=5).map(".".join), unique=True, max_size=24)


@settings(deadline=None)
@given(module_names, st.data())
def test_patterns_mean_the_names_and_no_others(names: list[str], data: st.DataObject) -> None:
    chosen = data.draw(st.sets(st.sampled_from(names))) if names else set()
    members, others = [n for n in names if n in chosen], [n for n in names if n not in chosen]
    patterns = covering_patterns(members, others)
    for name in names:
        assert any(matches(name, pattern) for pattern in patterns) == (name in chosen), patterns
    assert all(pattern.endswith("$") for pattern in patterns if pattern.startswith("re:"))

"""Whether compressed-tensors 0.17 accepts a ``quantization_config``: its schema as data, without the library.

0.17 is the strictest version that engines pin. Groups and arguments may hold no field that it does not know.
Source: quant_config.py, quant_scheme.py and quant_args.py of compressed-tensors 0.17.0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

GROUP_FIELDS = frozenset({"targets", "weights", "input_activations", "output_activations", "format"})
ARGS_FIELDS = frozenset(
    {
        *(
            "num_bits",
            "type",
            "symmetric",
            "group_size",
            "strategy",
            "block_structure",
            "dynamic",
            "actorder",
        ),
        *("scale_dtype", "zp_dtype", "observer", "observer_kwargs"),
    }
)
FORMATS = (
    *("dense", "sparse-bitmask", "sparse-24-bitmask", "int-quantized", "float-quantized", "naive-quantized"),
    *("pack-quantized", "marlin-24", "mixed-precision", "nvfp4-pack-quantized", "mxfp4-pack-quantized"),
    "mxfp8-quantized",
)
STATUSES = ("initialized", "calibration", "frozen", "compressed", "decompressed")
STRATEGIES = ("tensor", "channel", "group", "block", "token", "tensor_group", "attn_head")
INPUT_STRATEGIES = ("token", "tensor", "group", "tensor_group", "attn_head")
DYNAMIC_STRATEGIES = ("token", "tensor", "tensor_group", "group")
GROUPED = ("group", "tensor_group")
ACTORDERS = ("group", "weight", "static", "dynamic")
DTYPES = frozenset(
    {
        *("uint8", "int8", "int16", "int32", "int64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"),
        *("float16", "bfloat16", "float32", "float64"),
    }
)


class Problem(NamedTuple):
    """A field that the library refuses: its path in the config, its value, and what would be accepted."""

    where: str
    value: Any
    accepted: str

    def __str__(self) -> str:
        return f"{self.where} is {self.value!r}; accepted: {self.accepted}"


def schema_problems(config: Mapping[str, Any]) -> list[Problem]:
    """What compressed-tensors 0.17 would refuse in a ``quantization_config``; empty if it accepts it."""
    found: list[Problem] = []
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping):
        found.append(Problem("config_groups", groups, "a mapping of names to groups"))
        groups = {}
    for name, group in groups.items():
        _group(f"config_groups.{name}", group, found)
    if config.get("kv_cache_scheme") is not None:
        _args("kv_cache_scheme", config["kv_cache_scheme"], found)
    _one_of("format", config.get("format", "dense"), FORMATS, found)
    _one_of("quantization_status", config.get("quantization_status", "initialized"), STATUSES, found)
    _check("quant_method", config.get("quant_method", ""), _is_text, "text", found)
    _check("ignore", config.get("ignore"), _is_names, "a list of names", found, optional=True)
    ratio = config.get("global_compression_ratio")
    _check("global_compression_ratio", ratio, _is_number, "a number", found, optional=True)
    return found


def _group(where: str, group: Any, found: list[Problem]) -> None:
    if not isinstance(group, Mapping):
        found.append(Problem(where, group, "a group with targets and weights"))
        return
    _known_fields(where, group, GROUP_FIELDS, found)
    _check(f"{where}.targets", group.get("targets"), _is_names, "a list of names", found)
    for role in ("weights", "input_activations", "output_activations"):
        args = group.get(role)
        if args is None:
            continue
        _args(f"{where}.{role}", args, found)
        if role != "weights" and isinstance(args, Mapping) and args.get("actorder"):
            found.append(Problem(f"{where}.{role}.actorder", args["actorder"], "null"))
        if role == "input_activations" and isinstance(args, Mapping):
            _one_of(f"{where}.{role}.strategy", _strategy(args), INPUT_STRATEGIES, found)
    if group.get("format") is not None:
        accepted = tuple(name for name in FORMATS if name != "mixed-precision")
        _one_of(f"{where}.format", group["format"], accepted, found)


def _args(where: str, args: Any, found: list[Problem]) -> None:
    if not isinstance(args, Mapping):
        found.append(Problem(where, args, "a mapping of quantization arguments"))
        return
    before = len(found)
    _known_fields(where, args, ARGS_FIELDS, found)
    _check(f"{where}.num_bits", args.get("num_bits", 8), _is_integer, "an integer", found)
    _one_of(f"{where}.type", _lower(args.get("type", "int")), ("int", "float"), found)
    _check(f"{where}.symmetric", args.get("symmetric", True), _is_flag, "true or false", found)
    group = args.get("group_size")
    _check(f"{where}.group_size", group, _is_group, "null, -1 or a positive integer", found, optional=True)
    if args.get("strategy") is not None:
        _one_of(f"{where}.strategy", _lower(args["strategy"]), STRATEGIES, found)
    block = args.get("block_structure")
    _check(f"{where}.block_structure", block, _is_block, "[rows, columns]", found, optional=True)
    _one_of(f"{where}.dynamic", args.get("dynamic", False), (True, False, "local"), found)
    if args.get("actorder") is not None and not isinstance(args["actorder"], bool):
        _one_of(f"{where}.actorder", _lower(args["actorder"]), ACTORDERS, found)
    for field in ("scale_dtype", "zp_dtype"):
        _check(f"{where}.{field}", args.get(field), _is_dtype, "a torch dtype", found, optional=True)
    _check(f"{where}.observer", args.get("observer"), _is_text, "text", found, optional=True)
    kwargs = args.get("observer_kwargs", {})
    _check(f"{where}.observer_kwargs", kwargs, lambda value: isinstance(value, Mapping), "a mapping", found)
    if len(found) == before:
        _combinations(where, args, found)


def _combinations(where: str, args: Mapping[str, Any], found: list[Problem]) -> None:
    """Fields that are fine alone but not together."""
    strategy, group = _strategy(args), args.get("group_size")
    dynamic = args.get("dynamic", False)
    odd_float = _lower(args.get("type", "int")) == "float" and args.get("num_bits", 8) not in (4, 8)
    if odd_float and args.get("zp_dtype") is None:
        found.append(Problem(f"{where}.num_bits", args.get("num_bits"), "8 or 4 with type float"))
    if strategy == "token" and not dynamic:
        found.append(Problem(f"{where}.dynamic", dynamic, "true with strategy token"))
    if strategy in GROUPED and not (group and group > 0):
        found.append(Problem(f"{where}.group_size", group, f"a positive integer with strategy {strategy}"))
    if strategy not in GROUPED and group and group > 0:
        found.append(Problem(f"{where}.group_size", group, f"null or -1 with strategy {strategy}"))
    block = args.get("block_structure")
    if (strategy == "block") != (block is not None):
        found.append(
            Problem(f"{where}.block_structure", block, "[rows, columns] with strategy block, and only then")
        )
    order = args.get("actorder")
    if order in (True, "group", "dynamic") and strategy not in GROUPED:
        found.append(Problem(f"{where}.actorder", order, f"null or weight with strategy {strategy}"))
    if dynamic and strategy not in DYNAMIC_STRATEGIES:
        found.append(Problem(f"{where}.dynamic", dynamic, f"false with strategy {strategy}"))
    if dynamic == "local" and strategy != "tensor_group":
        found.append(
            Problem(f"{where}.dynamic", dynamic, "true or false; local goes with strategy tensor_group")
        )


def _strategy(args: Mapping[str, Any]) -> Any:
    """What the arguments say, else what their group size implies."""
    if args.get("strategy") is not None:
        return _lower(args["strategy"])
    group = args.get("group_size")
    if group is None:
        return "tensor"
    return "channel" if group == -1 else "group"


def _known_fields(where: str, given: Mapping[str, Any], known: frozenset[str], found: list[Problem]) -> None:
    accepted = f"no such field; known: {', '.join(sorted(known))}"
    found.extend(Problem(f"{where}.{field}", given[field], accepted) for field in given if field not in known)


def _one_of(where: str, value: Any, accepted: tuple[Any, ...], found: list[Problem]) -> None:
    if not any(type(value) is type(choice) and value == choice for choice in accepted):
        found.append(Problem(where, value, ", ".join(map(str, accepted))))


def _check(
    where: str,
    value: Any,
    accepts: Callable[[Any], bool],
    accepted: str,
    found: list[Problem],
    optional: bool = False,
) -> None:
    if not (optional and value is None) and not accepts(value):
        found.append(Problem(where, value, accepted))


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _is_integer(value: Any) -> bool:
    return type(value) is int


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_group(value: Any) -> bool:
    return type(value) is int and value >= -1


def _is_block(value: Any) -> bool:
    if isinstance(value, str):
        value = [int(side) if side.isdecimal() else side for side in value.split("x")]
    return isinstance(value, list) and len(value) == 2 and all(type(side) is int for side in value)


def _is_dtype(value: Any) -> bool:
    return isinstance(value, str) and value.removeprefix("torch.") in DTYPES

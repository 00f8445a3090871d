"""What a user wants done to a model: a scheme for everything, and exceptions by module name.

In YAML::

    scheme: w4a8                     # a preset, or "none" to quantize only the targets
    algorithm: awq+gptq              # steps joined by +; default awq+gptq with data, rtn without
    clip: mse                        # ranges of least error; default output with data, none without
    target: vllm                     # the numbers of vLLM's W4A8 kernel; default halfbyte's, exact scales
    format: qserve                   # QServe's files (scheme w4a8-int8); w4afp8: SGLang's, of mixtures (scheme w4a8:
                                     # experts, all else is fp8_per_block); default compressed-tensors
    ignore:
      - "re:.*layers\\.0\\."          # exact name, re:<regex from the start>, or wildcards
    targets:
      "*.down_proj": w8a8-int8       # another preset
      "*.o_proj":                    # or the default with other options
        group_size: 64
      lm_head: {scheme: w8a16}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, StrictBool, StrictInt, StrictStr, ValidationError

from halfbyte.assignment import Assignment, Choice, assign
from halfbyte.errors import HalfbyteError
from halfbyte.matching import Patterns
from halfbyte.method import ROTATION, RTN, Method
from halfbyte.models.layout import ModelLayout
from halfbyte.schemes import FormName, Scheme, TargetName, resolve

NO_SCHEME = "none"
PER_ROW = -1
DEFAULT_SCHEME = "w4a8"
Clip = Literal["none", "mse", "output"]


class Options(BaseModel):
    """A scheme with changes. What is not set comes from the recipe's own scheme and options.

    group_size: weights that share a scale; -1 for one scale per output row. Integer weights only.
    symmetric: whether zero points are left out. Integer weights only.
    algorithm, clip: see :class:`halfbyte.method.Method`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    scheme: StrictStr | None = None
    group_size: StrictInt | None = None
    symmetric: StrictBool | None = None
    algorithm: StrictStr | None = None
    clip: Clip | None = None


def _options(value: object) -> object:
    """A target may be a scheme's name alone."""
    return {"scheme": value} if isinstance(value, str) else value


class Recipe(BaseModel):
    """Which module gets which scheme. ``Recipe(scheme="w4a8", ignore=[...], targets={pattern: ...})``.

    A target's own ``scheme`` starts from that preset as it is; without one it changes the recipe's.
    See :func:`halfbyte.assignment.assign` for which rule decides.

    Errors: an unknown key, scheme or value; a pattern that stands in both ``ignore`` and ``targets`` or is no
    regular expression; an option that the scheme does not have.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    scheme: StrictStr = DEFAULT_SCHEME
    group_size: StrictInt | None = None
    symmetric: StrictBool | None = None
    algorithm: StrictStr = RTN
    clip: Clip | None = None
    target: TargetName = "halfbyte"
    format: FormName = "compressed-tensors"
    ignore: tuple[StrictStr, ...] = ()
    targets: dict[StrictStr, Annotated[Options, BeforeValidator(_options)]] = {}

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise HalfbyteError(f"recipe: {_explain(error)}") from error
        both = [pattern for pattern in self.ignore if pattern in self.targets]
        if both:
            raise HalfbyteError(f"recipe: {both[0]!r} stands in ignore and in targets; accepted: one of them")
        Patterns([*self.ignore, *self.targets])
        self._method(None, None)
        for pattern, options in self.targets.items():
            if options.algorithm and not self.rotates and ROTATION in options.algorithm.lower():
                raise HalfbyteError(
                    f"recipe: target {pattern!r} has {ROTATION}, which is of the whole model; accepted: it in the "
                    "recipe's own algorithm"
                )
        _ = self.default, self.choices

    @classmethod
    def load(cls, path: str | Path) -> Recipe:
        """Reads a YAML file.

        Errors: an unreadable file, YAML with errors or duplicate keys, and all that the class itself refuses.
        """
        try:
            data = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_UniqueKeys)
        except OSError as error:
            raise HalfbyteError(f"recipe {path}: {error.strerror}; accepted: a YAML file") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise HalfbyteError(f"recipe {path} is no valid YAML: {error}") from error
        if data is None:
            data = {}
        if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
            raise HalfbyteError(f"recipe {path} holds no mapping; accepted keys: {_accepted(cls)}")
        try:
            return cls(**data)
        except HalfbyteError as error:
            raise HalfbyteError(f"{path}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """The recipe as plain data: the same for equal recipes, and ``Recipe(**it)`` makes it again."""
        return self.model_dump(mode="json", exclude_none=True)

    @cached_property
    def default(self) -> Choice | None:
        """What linears and experts get that no rule means."""
        if self.scheme.lower() == NO_SCHEME:
            if self.group_size is not None or self.symmetric is not None:
                raise HalfbyteError("recipe: group_size and symmetric need a scheme, and scheme is 'none'")
            return None
        scheme = changed(resolve(self.scheme), self.group_size, self.symmetric)
        return Choice(self._settled(scheme), self._method(None, None))

    @cached_property
    def choices(self) -> Mapping[str, Choice]:
        """What each target's modules get."""
        return {pattern: self._choice(pattern, options) for pattern, options in self.targets.items()}

    @property
    def rotates(self) -> bool:
        """Whether the whole model is rotated before anything else."""
        return ROTATION in self._method(None, None).steps

    def assign(self, layout: ModelLayout) -> Assignment:
        """The decision for every module of ``layout``; see :func:`halfbyte.assignment.assign`."""
        return assign(layout, self.default, self.ignore, self.choices, self._dense)

    @property
    def _dense(self) -> Choice | None:
        """What linears get instead of the default where the format has one scheme for them and one for experts."""
        if self.format != "w4afp8" or self.default is None:
            return None
        return Choice(self._settled(resolve("fp8_per_block")), self._method(None, None))

    def _choice(self, pattern: str, options: Options) -> Choice:
        try:
            if options.scheme is not None:
                base = resolve(options.scheme)
            elif self.default is not None:
                base = self.default.scheme
            else:
                raise HalfbyteError("no scheme, and the recipe's is 'none'; accepted: a scheme")
            scheme = changed(base, options.group_size, options.symmetric)
            return Choice(self._settled(scheme), self._method(options.algorithm, options.clip))
        except HalfbyteError as error:
            raise HalfbyteError(f"recipe: target {pattern!r}: {error}") from error

    def _settled(self, scheme: Scheme) -> Scheme:
        """``scheme`` in the numbers of the recipe's target and format."""
        return scheme.aimed_at(self.target).stored_as(self.format)

    def _method(self, algorithm: str | None, clip: str | None) -> Method:
        """A target's own algorithm brings its own default of ``clip`` along, unless the recipe has one."""
        return Method.parse(algorithm or self.algorithm, clip or self.clip)


def changed(scheme: Scheme, group_size: int | None, symmetric: bool | None) -> Scheme:
    """``scheme`` with another group size (-1: one scale per output row) or symmetry of its weights.

    Errors: weights that are no integers, a two-level scheme made symmetric, a group size that is none.
    """
    weights = scheme.weights
    if (group_size is not None or symmetric is not None) and not weights.is_integer:
        raise HalfbyteError(
            f"scheme {scheme.name} fixes group_size and symmetric; accepted: schemes with integer weights"
        )
    if group_size is not None:
        if group_size != PER_ROW and group_size < 1:
            raise HalfbyteError(f"group_size {group_size}; accepted: a positive number, or -1 for rows")
        if group_size != PER_ROW:
            weights = replace(weights, granularity="group", group_size=group_size)
        elif weights.granularity == "group":
            # One level is left of a two-level scheme: the row's scale, in the model's own dtype.
            weights = replace(
                weights, granularity="channel", group_size=None, outer=None, outer_dtype="f32", scale="model"
            )
    if symmetric is not None:
        if symmetric and weights.outer is not None:
            raise HalfbyteError(
                f"scheme {scheme.name} has zero points by definition; accepted: symmetric: false"
            )
        weights = replace(weights, symmetric=symmetric)
    return replace(scheme, weights=weights)


_EXPECTED = {
    "tuple_type": "a list of patterns",
    "dict_type": "a mapping of patterns to schemes",
    "model_type": "a scheme's name or a mapping with some of: {options}",
}


def _explain(error: ValidationError) -> str:
    """The first complaint as one line: the key, the value and what is accepted."""
    first = error.errors()[0]
    *parents, key = map(str, first["loc"])
    where = f"{key!r}{f' in {chr(32).join(map(repr, parents))}' if parents else ''}"
    if first["type"] == "extra_forbidden":
        return f"key {where} is not known; accepted: {_accepted(Options if parents else Recipe)}"
    expected = _EXPECTED.get(first["type"], first["msg"].removeprefix("Input should be "))
    return f"{where} is {first['input']!r}; accepted: {expected.format(options=_accepted(Options))}"


def _accepted(model: type[BaseModel]) -> str:
    return ", ".join(model.model_fields)


class _UniqueKeys(yaml.SafeLoader):
    """YAML in which a key twice is an error; plain YAML would let the last one win in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = next((key for index, key in enumerate(keys) if key in keys[:index]), None)
        if twice is not None:
            problem = f"key {twice!r} stands there twice"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_mapping(node, deep)

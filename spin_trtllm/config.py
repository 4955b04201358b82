# SPDX-License-Identifier: Apache-2.0
"""`SpinConfig`: the knobs of SPEC 2, validated once; equal in YAML, dict and environment."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from spin_trtllm.errors import SpinError, check_integer, refuse
from spin_trtllm.geometry import to_ppm
from spin_trtllm.layer_sparsity import (
    FIELD,
    LayerSparsity,
    read_layer_sparsity,
    write_layer_sparsity,
)

ENVIRONMENT_PREFIX = "TLLM_SPIN_"  # TensorRT-LLM hands TLLM* variables on to its workers

BLOCK_SIZES = (8, 16, 32, 64, 128)
POOLINGS = ("max", "top4", "mean")
REDUCTIONS = ("A0", "A1", "A2")
EXPLORATION_POLICIES = ("none", "random", "staleness", "age")
MASK_POLICIES = ("union", "row0")
UPDATE_POLICIES = ("prefix", "row0")
QUERY_POOLINGS = ("mean", "minmax")
QUERY_MERGES = ("split", "union", "max")
MAX_TOP_K = 2**20  # no context has more slots
BACKENDS = ("auto", "host", "fused")
STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "log8": torch.int8}

_MAX_YAML_CHARACTERS = 2**20  # a device or a weight file by mistake is not read to its end

_CHOICES: dict[str, tuple[Any, ...]] = {
    "block_size": BLOCK_SIZES,
    "pooling": POOLINGS,
    "reduction": REDUCTIONS,
    "exploration_policy": EXPLORATION_POLICIES,
    "mask_policy": MASK_POLICIES,
    "update_policy": UPDATE_POLICIES,
    "state_dtype": tuple(STATE_DTYPES),
    "query_pooling": QUERY_POOLINGS,
    "query_merge": QUERY_MERGES,
    "backend": BACKENDS,
}


@dataclass(frozen=True)
class SpinConfig:
    """Parameters of SPIN (SPEC 2).

    Attributes:
        block_size: `b`, slots a block.
        target_sparsity: `rho` in [0, 1), share of blocks that a decode step skips.
        layer_sparsity: `rho` of single decoder layers, ascending pairs; given as a mapping or as
            text, too (`read_layer_sparsity`). Other layers have `target_sparsity`.
        ema_decay: `alpha` in [0, 1), weight of the past in both averages.
        exploration: `gamma` in [0, 1], share of the kept blocks chosen by exploration.
        top_k: `K`, slots the attention reads; None takes the model's own value.
        pooling: slot scores to a block score.
        reduction: A1 (slot averages, block budget) is the product; A0 and A2 are for replay.
        exploration_policy: `random` is the product; the others are for replay.
        mask_policy: blocks shared by the rows of a draft: `union` of all, or those of `row0`.
        update_policy: rows that update the averages: the accepted `prefix`, or `row0` only.
        seed: seed of the exploration priorities, 0 .. 2**64-1.
        state_dtype: storage of the averages, `fp32`, `bf16` or `log8`, 8-bit logarithms, which the
            kernels lack; arithmetic is always fp32.
        staleness_weight: lambda of the `staleness` policy: score one step of age is worth.
        query_share: share of the ranked blocks, in [0, 1], that the current query ranks; 0 is off.
        query_pooling: what stands for a block before the query: the `mean` of its keys, or a bound
            from the smallest and largest of each component (`minmax`).
        query_merge: how the two rankings share: `split`; `union`, which skips more than the target
            where they agree; or `max`.
        backend: under TensorRT-LLM, what scores the kept blocks: the `host`'s kernels, this
            package's `fused` ones, or `auto`, which also leaves alone the steps too small to gain.

    Raises:
        SpinError: a value outside its range, an unknown field, or a wrong type.
    """

    block_size: int = 64
    target_sparsity: float = 0.4
    layer_sparsity: LayerSparsity = ()
    ema_decay: float = 0.5
    exploration: float = 0.05
    top_k: int | None = None
    pooling: str = "max"
    reduction: str = "A1"
    exploration_policy: str = "random"
    mask_policy: str = "union"
    update_policy: str = "prefix"
    seed: int = 0
    state_dtype: str = "fp32"
    staleness_weight: float = 0.01
    query_share: float = 0.0
    query_pooling: str = "mean"
    query_merge: str = "split"
    backend: str = "auto"

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            _check_choice(name, getattr(self, name), allowed)
        _check_fraction(self, "target_sparsity", below_one=True)
        _check_fraction(self, "ema_decay", below_one=True)
        _check_fraction(self, "exploration", below_one=False)
        _check_fraction(self, "query_share", below_one=False)
        if to_ppm(self.target_sparsity) >= 1_000_000:
            refuse("target_sparsity", self.target_sparsity, "a number in [0, 1) in steps of 1e-6")
        object.__setattr__(self, FIELD, read_layer_sparsity(self.layer_sparsity))
        if self.top_k is not None:
            check_integer("top_k", self.top_k, 1, MAX_TOP_K)
        check_integer("seed", self.seed, 0, 2**64 - 1)
        weight = _as_float("staleness_weight", self.staleness_weight, "a finite number >= 0")
        if not 0 <= weight < math.inf:
            refuse("staleness_weight", self.staleness_weight, "a finite number >= 0")
        object.__setattr__(self, "staleness_weight", weight)

    @property
    def sparsity_ppm(self) -> int:
        """`rho_ppm` of SPEC 2."""
        return to_ppm(self.target_sparsity)

    def layer_ppm(self, layer: int) -> int:
        """`rho_ppm` of a decoder layer: its own, or else that of all."""
        return to_ppm(dict(self.layer_sparsity).get(layer, self.target_sparsity))

    def check_layers(self, layers: Sequence[int]) -> None:
        """Refuse a target of a layer that has no indexer.

        Args:
            layers: decoder-layer indices of the model's indexers.

        Raises:
            SpinError: `layer_sparsity` names another one.
        """
        for layer, _ in self.layer_sparsity:
            if layer not in layers:
                refuse(f"{FIELD}: layer", layer, f"indexer layers {list(layers)}")

    def of_layers(self, layers: Sequence[int]) -> SpinConfig:
        """This configuration without the targets of other layers, which another rank has."""
        own = tuple(pair for pair in self.layer_sparsity if pair[0] in layers)
        return replace(self, layer_sparsity=own)

    @property
    def sparsity_text(self) -> str:
        """The targets for people: `0.4`, or `0.4 (layers 1:0.5,3:0.3)`."""
        own = write_layer_sparsity(self.layer_sparsity)
        return f"{self.target_sparsity}" + (f" (layers {own})" if own else "")

    @property
    def exploration_ppm(self) -> int:
        """`gamma_ppm` of SPEC 2; 0 when exploration is off."""
        return 0 if self.exploration_policy == "none" else to_ppm(self.exploration)

    @property
    def query_share_ppm(self) -> int:
        """`query_share` in parts per million; 0 when the current query ranks nothing."""
        return to_ppm(self.query_share)

    @property
    def storage_dtype(self) -> torch.dtype:
        """Torch dtype of the stored averages; that of `log8` is int8."""
        return STATE_DTYPES[self.state_dtype]

    def with_top_k(self, model_top_k: int) -> SpinConfig:
        """This configuration with `top_k` settled: its own value, else the model's."""
        return self if self.top_k is not None else replace(self, top_k=model_top_k)

    def at_sparsity(self, target_sparsity: float) -> SpinConfig:
        """This configuration with one target for all layers."""
        return replace(self, target_sparsity=target_sparsity, layer_sparsity=())

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, source: str = "spin") -> SpinConfig:
        """Build from a mapping. Unknown fields are refused by name, missing ones keep defaults."""
        return cls().with_fields(values, source=source)

    def with_fields(self, values: Mapping[str, Any], *, source: str = "spin") -> SpinConfig:
        """This configuration with some fields changed; unknown ones are refused by name."""
        known = [f.name for f in fields(self)]
        for name in values:
            if name not in known:
                refuse(f"{source}: field", name, ", ".join(known))
        return replace(self, **values)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, in field order; `from_dict` reads them back to an equal configuration."""
        return asdict(self) | {FIELD: dict(self.layer_sparsity)}

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> SpinConfig:
        """Read a YAML file: the fields at top level, or under one key `spin`."""
        return cls().with_yaml(path)

    def with_yaml(self, path: str | os.PathLike[str]) -> SpinConfig:
        """This configuration with the fields that a YAML file has changed."""
        loaded = _load_yaml(path)
        if isinstance(loaded, dict) and set(loaded) == {"spin"}:
            loaded = loaded["spin"]
        if loaded is None:
            loaded = {}
        if not isinstance(loaded, dict):
            refuse(f"spin_config: {path}", type(loaded).__name__, "a YAML mapping of SPIN fields")
        return self.with_fields(loaded, source=str(path))

    def to_yaml(self) -> str:
        """YAML text that `from_yaml` reads back to an equal configuration."""
        return yaml.safe_dump({"spin": self.to_dict()}, sort_keys=False)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> SpinConfig:
        """Read `TLLM_SPIN_<FIELD>` variables; fields without one keep their defaults."""
        environment = os.environ if environment is None else environment
        values: dict[str, Any] = {}
        for field in fields(cls):
            variable = ENVIRONMENT_PREFIX + field.name.upper()
            if variable in environment:
                values[field.name] = _parse(variable, environment[variable], str(field.type))
        return cls.from_dict(values)

    def to_environment(self) -> dict[str, str]:
        """Variables that `from_environment` reads back to an equal configuration."""
        text = write_layer_sparsity(self.layer_sparsity)
        return {
            ENVIRONMENT_PREFIX + name.upper(): "null" if value is None else str(value)
            for name, value in (self.to_dict() | {FIELD: text}).items()
        }


def preset_path(name: str) -> Path:
    """Path of a preset under `build_configs/`, by file stem such as `deepseek-v4-flash`."""
    package = Path(__file__).parent
    folders = [package / "build_configs", package.parent / "build_configs"]
    for folder in folders:
        path = folder / f"{name}.yaml"
        if path.is_file():
            return path
    names = sorted({p.stem for folder in folders for p in folder.glob("*.yaml")})
    refuse("preset", name, ", ".join(names) or "none: no preset is installed")


def preset(name: str) -> SpinConfig:
    """A preset of `build_configs/`, by file stem."""
    return SpinConfig.from_yaml(preset_path(name))


def _parse(variable: str, text: str, type_name: str) -> Any:
    """One environment variable as the type its field is annotated with."""
    if type_name in ("str", "LayerSparsity"):
        return text
    if type_name.endswith("None") and text == "null":
        return None
    try:
        return float(text) if type_name == "float" else int(text)
    except ValueError:
        refuse(variable, text, "a number" if type_name == "float" else "an integer")


def _check_choice(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    # `True == 1` and `64.0 == 64`: compare types too, so that a YAML typo is not taken silently.
    if not any(type(value) is type(a) and value == a for a in allowed):
        refuse(name, value, ", ".join(str(a) for a in allowed))


def _check_fraction(config: SpinConfig, name: str, *, below_one: bool) -> None:
    allowed = "a number in [0, 1)" if below_one else "a number in [0, 1]"
    value = getattr(config, name)
    number = _as_float(name, value, allowed)
    if not (0 <= number < 1 or (number == 1 and not below_one)):  # also refuses NaN
        refuse(name, value, allowed)
    object.__setattr__(config, name, number)  # 0 and 0.0 are one configuration


def _as_float(name: str, value: Any, allowed: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        refuse(name, value, allowed)
    try:
        return float(value)
    except OverflowError:
        refuse(name, value, allowed)


class _OnceLoader(yaml.SafeLoader):
    """PyYAML's safe loader, which would let the last of two equal keys win in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if (key.tag, key.value) in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"key {key.value!r} for the second time", problem_mark=key.start_mark
                )
            seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


def _load_yaml(path: str | os.PathLike[str]) -> Any:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(_MAX_YAML_CHARACTERS + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise SpinError(f"spin_config: cannot read {str(path)!r}: {reason}") from error
    if len(text) > _MAX_YAML_CHARACTERS:
        refuse(f"spin_config: {path}", "a larger file", f"{_MAX_YAML_CHARACTERS} characters")
    try:
        return yaml.load(text, Loader=_OnceLoader)
    except Exception as error:  # PyYAML's constructors raise far more than YAMLError
        where = " ".join(str(error).split()) or type(error).__name__
        raise SpinError(f"spin_config: {str(path)!r} is not valid YAML: {where[:200]}") from error

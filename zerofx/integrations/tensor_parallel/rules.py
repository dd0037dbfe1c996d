"""Which layers are cut how: rules of a `ds_config.json`, and plans that models bring along."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

from torch import nn

from zerofx.errors import ConfigError, UnsupportedError
from zerofx.integrations.tensor_parallel.linear import Cut

Way = Literal["outputs", "outputs, joined", "inputs", "inputs, cut here", "tail", "whole", "summed"]
"""How a layer is held; `summed`: whole, and ranks compute parts of its gradient."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """Layers that are held alike.

    Attributes:
        pattern: regular expression that names of parameters begin with.
        way: how they are held.
        shape: how to look at a weight before it is cut; a size of -1 is what is left, and sizes in
            a sequence are those of sections that are each cut.
        dim: of `shape`, along which it is cut; by default outputs or inputs.
        models: types of models that the rule is for; by default all.

    Raises:
        ConfigError: there is no such way, or the pattern is no regular expression.
    """

    pattern: str
    way: Way
    shape: Sequence[Any] | None = None
    dim: int | None = None
    models: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        ways = get_args(Way)
        if self.way not in ways:
            raise ConfigError(
                f"the rule for {self.pattern!r} says {self.way!r} of how layers are held",
                f"use one of {', '.join(map(repr, ways))}",
            )
        try:
            re.compile(self.pattern)
        except (re.error, TypeError) as error:
            raise ConfigError(
                f"a rule has the pattern {self.pattern!r}: {error}",
                "write a regular expression that names of parameters begin with",
            ) from error

    def fits(self, name: str, model: str | None) -> bool:
        """Whether it is for the parameter of that name."""
        if self.models and (model or "").lower() not in self.models:
            return False
        return re.match(self.pattern, name) is not None

    def cut(self, name: str, linear: nn.Linear, size: int) -> Cut:
        """Which part of the weight each of `size` ranks holds.

        Raises:
            ConfigError: the shape does not suit the weight, or a section is not a multiple.
        """
        dim = 0 if self.way.startswith("outputs") else 1
        whole = linear.weight.shape[dim]
        sections = (whole,) if self.shape is None else _sections(self.shape, self.dim, dim, whole)
        if not sections or sum(sections) != whole:
            raise ConfigError(
                f"{name} has {whole} {_SIDES[dim]}, which shape {list(self.shape or ())} and "
                f"partition_dim {self.dim} do not describe",
                "change tensor_parallel.partition_config",
            )
        if any(section % size for section in sections):
            raise ConfigError(
                f"{name} has {whole} {_SIDES[dim]}, in sections of {list(sections)}, which "
                f"{size} ranks cannot share equally",
                'take another autotp_size, or a partition_type of "skip" for it',
            )
        return Cut(dim, sections)


def rule_for(name: str, rules: Sequence[Rule], model: nn.Module) -> Rule | None:
    """The first rule that is for a parameter of a model."""
    return next((rule for rule in rules if rule.fits(name, _kind(model))), None)


def idle_patterns(rules: Sequence[Rule], model: nn.Module) -> list[str]:
    """Patterns that fit nothing which their rules could hold, as one with a slip of the pen.

    Rules of presets, and those for other types of models, need not fit.
    """
    kind = _kind(model)
    params = dict(nn.Module.named_parameters(model, remove_duplicate=False))
    layers = [name for name, each in params.items() if name.endswith("weight") and each.ndim > 1]
    return [
        rule.pattern
        for rule in rules
        if not rule.models or (kind or "").lower() in rule.models
        if not any(rule in preset for preset in PRESETS.values())
        if not any(rule.fits(name, kind) for name in (params if rule.way in _ANY else layers))
    ]


def _kind(model: nn.Module) -> str | None:
    return getattr(getattr(model, "config", None), "model_type", None)


_ANY: tuple[Way, ...] = ("whole", "summed")  # parameters that need not be a layer's
_SIDES = ("outputs", "inputs")


def _sections(shape: Sequence[Any], at: int | None, dim: int, whole: int) -> tuple[int, ...]:
    """Sizes along `dim` of a weight that is looked at as of `shape`, and cut along its `at`."""
    at = dim if at is None else at
    if not 0 <= at < len(shape) or len(shape) not in (2, 3):
        return ()
    if isinstance(shape[at], list | tuple):
        return tuple(shape[at])
    if len(shape) == 2:
        number = 1 if shape[at] == -1 else shape[at]
    else:  # a weight that many experts share: the first two are its outputs
        number = shape[0] if at == 1 else 1
    same_side = (at == dim) if len(shape) == 2 else ((at == 2) == (dim == 1))
    if not same_side or not isinstance(number, int) or number < 1 or whole % number:
        return ()
    return (whole // number,) * number


_WAYS: dict[str, Way] = {"column": "outputs", "row": "inputs", "skip": "whole"}
_EXTRAS: tuple[tuple[str, str, Way], ...] = (
    ("gather_output", "column", "outputs, joined"),
    ("grad_allreduce", "skip", "summed"),
)
_FIELDS = (
    *("patterns", "partition_type", "shape", "partition_dim", "model_types", "gather_output"),
    "grad_allreduce",
)


def rules_of(specs: Any) -> tuple[Rule, ...]:
    """The rules of `partition_config.layer_specs`.

    Raises:
        ConfigError: they are written wrongly.
    """
    if not isinstance(specs, list) or not all(isinstance(spec, Mapping) for spec in specs):
        raise ConfigError("layer_specs is no list of objects", "write [{…}, {…}]")
    return tuple(rule for spec in specs for rule in _rules(spec))


def _rules(spec: Mapping[str, Any]) -> Iterator[Rule]:
    kind, dim = str(spec.get("partition_type", "column")).lower(), spec.get("partition_dim")
    shape, patterns = spec.get("shape"), spec.get("patterns", [])
    stray = sorted(spec.keys() - set(_FIELDS))
    good = isinstance(shape, list | None) and isinstance(dim, int | None) and kind in _WAYS
    if stray or not good or not isinstance(patterns, list):
        raise ConfigError(
            f"a layer_spec is {dict(spec)!r}", f"its keys are {', '.join(_FIELDS)}", stray
        )
    way = _WAYS[kind]
    for key, only, instead in _EXTRAS:
        if spec.get(key) and kind != only:
            raise ConfigError(
                f"the layer_spec of {patterns} has {key}, and a partition_type of {kind!r}",
                f"{key} is for a partition_type of {only!r}; leave it out",
            )
        way = instead if spec.get(key) else way
    kinds: Any = spec.get("model_types") or ()
    models = tuple(str(each).lower() for each in ([kinds] if isinstance(kinds, str) else kinds))
    for pattern in patterns:
        yield Rule(pattern, way, shape, dim, models)


_PLANS: dict[str, Way] = {
    "colwise": "outputs",
    "colwise_rep": "outputs, joined",
    "colwise_gather_output": "outputs, joined",
    "packed_colwise": "outputs",
    "rowwise": "inputs",
    "rowwise_split_input": "inputs, cut here",
    "replicated_with_grad_allreduce": "summed",
    "mla_kv_a_proj": "tail",
    "embedding_rowwise": "whole",
}
_LAYERS = ("outputs", "outputs, joined", "inputs", "inputs, cut here", "tail")


def rules_in(model: nn.Module) -> tuple[Rule, ...]:
    """The rules of `tp_plan`, which models of transformers bring along.

    Experts whose weights are one tensor stay whole, as in DeepSpeed, with their router.

    Raises:
        UnsupportedError: a plan has a style that is not known here.
    """
    rules: list[Rule] = []
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    for prefix, plan in _plans(model):
        for place, style in plan.items():
            pattern = re.escape(f"{prefix}{place}").replace(r"\*", r"\d+")
            layers = [name for name in modules if re.fullmatch(pattern, name)]
            way = _PLANS.get(style)
            if any(re.fullmatch(pattern, name) for name in parameters) or not layers:
                continue  # a tensor of experts; or of a part that this model lacks
            if any(type(child).__name__.endswith("Experts") for child in map(modules.get, layers)):
                continue
            plain = all(type(modules[name]) is nn.Linear for name in layers)
            if way is None or (way in _LAYERS and not plain):
                raise UnsupportedError(
                    f"tp_plan says {style!r} of {layers[0]}, a {type(modules[layers[0]]).__name__}",
                    "say how layers are cut in tensor_parallel.partition_config",
                )
            shape = (2, -1) if style == "packed_colwise" else None
            rules.append(Rule(rf"{pattern}\.", way, shape))
    return tuple(rules)


def _plans(model: nn.Module) -> Iterator[tuple[str, dict[str, str]]]:
    """The outermost plans, with what their names begin with."""
    plan = getattr(model, "tp_plan", None)
    if isinstance(plan, Mapping) and plan:
        yield "", dict(plan)
        return
    for name, child in model.named_children():
        yield from ((f"{name}.{prefix}", found) for prefix, found in _plans(child))


def _preset(outputs: str, inputs: str, **fused: tuple[int, ...]) -> tuple[Rule, ...]:
    shape = {name.replace("__", "."): sizes for name, sizes in fused.items()}
    return (
        *(Rule(rf".*\.{name}\.weight$", "inputs") for name in inputs.split()),
        *(Rule(rf".*\.{name}\.weight$", "outputs", (*sizes, -1)) for name, sizes in shape.items()),
        *(Rule(rf".*\.{name}\.weight$", "outputs") for name in outputs.split()),
    )


_LLAMA = _preset(r"self_attn\.[qkv]_proj mlp\.(up|gate)_proj", r"self_attn\.o_proj mlp\.down_proj")
PRESETS: dict[str, tuple[Rule, ...]] = {
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "bloom": (  # its model makes the biases of all heads
        Rule(r".*\.self_attention\.query_key_value\.weight$", "outputs, joined"),
        Rule(r".*\.self_attention\.dense\.weight$", "inputs, cut here"),
        *_preset(r"mlp\.dense_h_to_4h", r"mlp\.dense_4h_to_h"),
    ),
    "chatglm": _preset(
        "",
        r"self_attention\.dense mlp\.dense_4h_to_h",
        self_attention__query_key_value=(3,),
        mlp__dense_h_to_4h=(2,),
    ),
    "mixtral": _preset(
        r"self_attn\.[qkv]_proj block_sparse_moe\.experts\.\d+\.w[13]",
        r"self_attn\.o_proj block_sparse_moe\.experts\.\d+\.w2",
    ),
    "deepseek_v2": (
        Rule(r".*\.self_attn\.kv_a_proj_with_mqa\.weight$", "tail"),
        *_preset(
            r"self_attn\.(q|q_b|kv_b)_proj mlp\.(experts\.\d+|shared_experts)\.(up|gate)_proj",
            r"self_attn\.o_proj mlp\.(experts\.\d+|shared_experts)\.down_proj",
        ),
    ),
    "phi3": (  # its attention takes the fused matrix apart by the sizes of the whole model
        Rule(r".*\.(self_attn\.qkv_proj|mlp\.gate_up_proj)\.weight$", "outputs, joined"),
        Rule(r".*\.(self_attn\.o_proj|mlp\.down_proj)\.weight$", "inputs, cut here"),
    ),
}
"""What `preset_model` names."""

"""A whole model becomes the part of it that one rank holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zerofx.errors import ConfigError, UnsupportedError
from zerofx.integrations.tensor_parallel.linear import (
    ColumnLinear,
    Cut,
    RowLinear,
    TailLinear,
    cut_inputs,
    cut_outputs,
    sum_tail,
)
from zerofx.integrations.tensor_parallel.rules import Rule, Way, rule_for
from zerofx.runtime.params import PART
from zerofx.sequence.cuts import Place

_COUNTS = (
    *("n_heads", "num_heads", "num_attention_heads", "num_attn_heads", "num_kv"),
    *("num_key_value_heads", "num_kv_heads", "kv_n_heads", "num_attention_heads_per_partition"),
    "num_multi_query_groups_per_partition",
)
_WIDTHS = (
    *("all_head_size", "inner_dim", "embed_dim", "hidden_size", "d_model"),
    "hidden_size_per_partition",
)
"""Attributes of modules that hold cut layers, which DeepSpeed divides, too."""


@dataclasses.dataclass(frozen=True)
class Held:
    """How one layer is held.

    Attributes:
        way: see `Way`.
        linear: the layer.
        cut: which part of its weight a rank holds, if it is cut.
    """

    way: Way
    linear: nn.Linear
    cut: Cut | None = None


def plan(model: nn.Module, rules: Sequence[Rule], size: int, *, strict: bool) -> dict[str, Held]:
    """How each linear layer is held, by name.

    Args:
        model: whole, neither sharded nor on the `meta` device.
        rules: the first that fits is taken.
        size: ranks that share the model.
        strict: a layer without a rule is an error.

    Raises:
        ConfigError: no rule fits any layer, or a layer cannot be cut so.
        UnsupportedError: a layer is of a class that is not known here.
    """
    _refuse_unfit(model)
    shared = _shared(model)
    held: dict[str, Held] = {}
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is None or weight.ndim < 2:
            continue
        rule = rule_for(f"{name}.weight", rules, model)
        if rule is not None and rule.way not in ("whole", "summed"):
            held[name] = _held(name, module, rule, size, tied=id(weight) in shared)
        elif rule is None and strict and isinstance(module, nn.Linear):
            raise ConfigError(
                f"no layer_spec fits {name}, and strict_mode is set",
                'name it with a partition_type of "skip"',
            )
    if not any(each.cut for each in held.values()):
        raise ConfigError(
            f"no rule fits a layer of {type(model).__name__} that ranks could share",
            'patterns are what names of weights begin with, as in Rule(r".*up_proj", "outputs"); '
            "in a file, tensor_parallel.partition_config has them, or a preset_model that fits",
        )
    return held


def _held(name: str, layer: nn.Module, rule: Rule, size: int, *, tied: bool) -> Held:
    if type(layer) is not nn.Linear:
        raise UnsupportedError(
            f"{name} is a {type(layer).__name__}, and only nn.Linear is cut",
            'give it a partition_type of "skip", or divide the model before adapters are added',
        )
    if rule.way == "tail":
        return Held("tail", layer)
    if tied and rule.way == "outputs, joined":
        return Held("whole", layer)  # as in DeepSpeed: an embedding has it, too
    if tied:
        raise ConfigError(
            f"the weight of {name} is another module's, too, and cannot be cut for one of them",
            'give it a partition_type of "skip"',
        )
    return Held(rule.way, layer, rule.cut(name, layer, size))


def divide(model: nn.Module, held: dict[str, Held], place: Place) -> None:
    """Keep what the rank at `place` holds; parameters stay the same objects.

    Raises:
        ConfigError: heads of attention, or a width, would be cut through.
    """
    parents = _parents(model, [name for name, each in held.items() if each.way == "outputs"])
    for name, parent in parents.items():
        _check_numbers(name, parent, place.size)
    for parent in parents.values():
        _divide_numbers(parent, place.size)
    for name, each in held.items():
        if each.way == "tail":
            sum_tail(each.linear, _rotary(model, name), place)
        elif each.cut is not None and each.cut.dim == 0:
            cut_outputs(each.linear, each.cut, place, joins=each.way == "outputs, joined")
        elif each.cut is not None:
            cut_inputs(each.linear, each.cut, place, cuts=each.way == "inputs, cut here")


def _parents(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    above = [name.rpartition(".")[0] for name in names]
    return {name: model.get_submodule(name) for name in above}


def _check_numbers(name: str, parent: nn.Module, size: int) -> None:
    counts = {each: getattr(parent, each, None) for each in _COUNTS}
    counts |= {each: vars(parent).get(each) for each in _WIDTHS}
    config = getattr(parent, "config", None)
    if config is not None and hasattr(parent, "head_dim"):  # an attention of transformers
        for each in ("num_attention_heads", "num_key_value_heads"):
            counts[each] = counts[each] or getattr(config, each, None)
    for attribute, count in counts.items():
        if isinstance(count, int) and count % size:
            raise ConfigError(
                f"{name} has {attribute} {count}, which {size} ranks cannot share equally",
                'take another autotp_size, or a partition_type of "skip" for its layers',
            )


def _divide_numbers(parent: nn.Module, size: int) -> None:
    """A module computes with the heads that its rank has."""
    for attribute in (*_COUNTS, *_WIDTHS):
        number = vars(parent).get(attribute)
        if isinstance(number, int):
            setattr(parent, attribute, number // size)


def _rotary(model: nn.Module, name: str) -> int:
    parent = model.get_submodule(name.rpartition(".")[0])
    found = getattr(parent, "qk_rope_head_dim", None)
    found = found or getattr(getattr(parent, "config", None), "qk_rope_head_dim", None)
    if not isinstance(found, int):
        raise UnsupportedError(
            f"{name} makes rotary keys for all heads, and nothing says qk_rope_head_dim",
            "set it on the module that holds the layer",
        )
    return found


def _shared(model: nn.Module) -> set[int]:
    seen: set[int] = set()
    twice: set[int] = set()
    for module in model.modules():
        for _, param in nn.Module.named_parameters(module, recurse=False):
            (twice if id(param) in seen else seen).add(id(param))
    return twice


def _refuse_unfit(model: nn.Module) -> None:
    params = dict(model.named_parameters())
    if any(isinstance(each, ColumnLinear | RowLinear | TailLinear) for each in model.modules()):
        raise ConfigError(
            "the model is divided already", "call parallelize once, on a model that is whole"
        )
    sharded = [name for name, param in params.items() if isinstance(param, DTensor)]
    if sharded:
        raise ConfigError(
            "the model is sharded already",
            "divide it before it is sharded or compiled",
            sharded[:3],
        )
    nowhere = [name for name, param in params.items() if param.is_meta]
    if nowhere:
        raise ConfigError(
            "parameters are on the meta device", "load the model before it is divided", nowhere
        )
    adapted = [name for name, module in model.named_modules() if hasattr(module, "base_layer")]
    if adapted:
        raise UnsupportedError(
            "layers have adapters, which are not divided with them",
            "train adapters without tensor_parallel",
            adapted[:3],
        )


def mark(model: nn.Module, held: dict[str, Held], rules: Sequence[Rule]) -> None:
    """Note on parameters what of them a rank holds; sharding and copies keep such attributes.

    Modules keep the notes, too, for parameters that `load_state_dict(assign=True)` puts there.
    """
    for each in held.values():
        if each.cut is not None:
            _note(each.linear, "weight", _CUT, each.cut)
        if each.cut is not None and each.cut.dim == 0 and each.linear.bias is not None:
            _note(each.linear, "bias", _CUT, each.cut)
    for name, _ in model.named_parameters():
        rule = rule_for(name, rules, model)
        if rule is not None and rule.way == "summed":
            owner, _, key = name.rpartition(".")
            _note(model.get_submodule(owner), key, _SUMMED, True)


def _note(module: nn.Module, key: str, note: str, value: Any) -> None:
    notes: dict[str, tuple[str, Any]] | None = vars(module).get(_NOTES)
    if notes is None:
        notes = vars(module)[_NOTES] = {}
        module.register_load_state_dict_post_hook(_note_again)
    notes[key] = note, value
    _note_again(module)


def _note_again(module: nn.Module, _: Any = None) -> None:
    for key, (note, value) in vars(module)[_NOTES].items():
        if (param := getattr(module, key, None)) is not None:
            setattr(param, note, value)


def cut_of(param: Tensor) -> Cut | None:
    """Which part of a parameter's whole value ranks hold; `None`: all of it."""
    return getattr(param, _CUT, None)


def is_summed(param: Tensor) -> bool:
    """Whether ranks compute parts of a whole parameter's gradient."""
    return getattr(param, _SUMMED, False)


_CUT, _SUMMED, _NOTES = PART, "tensor_parallel_summed", "tensor_parallel_notes"


def share_random_numbers(src: int, group: torch.distributed.ProcessGroup) -> None:
    """Ranks that share a model drop the same values."""
    states: list[Tensor | None] = [torch.get_rng_state(), None]
    if torch.cuda.is_available():
        states[1] = torch.cuda.get_rng_state()
    torch.distributed.broadcast_object_list(states, src, group=group)
    for state, use in zip(states, (torch.set_rng_state, torch.cuda.set_rng_state), strict=True):
        if state is not None:
            use(state)

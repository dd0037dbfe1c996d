"""Read-only analyses of a program: order, readers, aliases."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, fx

from zerofx.ir.facts import Role, facts
from zerofx.ir.ops import REDUCE_GRAD, REDUCE_WAIT, UNSHARD_START, UNSHARD_WAIT, is_call
from zerofx.torch_private import same_shape, shares_storage

_aten = torch.ops.aten
# Their schemas promise fresh memory, their kernels return the input's.
_HIDDEN_VIEWS = (
    _aten._unsafe_view.default,
    _aten.unsafe_split.Tensor,
    _aten.unsafe_split_with_sizes.default,
    _aten.lift_fresh.default,
    _aten.alias.default,
)
_IDENTITIES = (_aten.view.default, _aten.alias.default, _aten.detach.default)
_CASTS = (_aten._to_copy.default, torch.ops.prims.convert_element_type.default)


def positions(graph: fx.Graph) -> dict[fx.Node, int]:
    """Place of each node in execution order."""
    return {node: index for index, node in enumerate(graph.nodes)}


def computes_in(dtype: torch.dtype, graph: fx.Graph) -> bool:
    """Whether any value of `graph` has `dtype`."""
    values = (node.meta.get("val") for node in graph.nodes)
    return any(isinstance(value, Tensor) and value.dtype is dtype for value in values)


def written_inputs(node: fx.Node) -> list[fx.Node]:
    """Inputs that an operation changes, by its schema."""
    found: list[fx.Node] = []
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return found
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            fx.map_arg(given, found.append)
    return found


def aliased_inputs(node: fx.Node) -> list[fx.Node]:
    """Inputs whose memory the value of `node` may share."""
    if node.op != "call_function":
        return []
    if is_call(node, UNSHARD_WAIT, UNSHARD_START, REDUCE_WAIT):
        return []
    if is_getitem(node) or node.target in _HIDDEN_VIEWS or _schema_aliases(node.target):
        return node.all_input_nodes[:1] if is_getitem(node) else node.all_input_nodes
    return [arg for arg in node.all_input_nodes if _same_storage(node, arg)]


def alias_closure(node: fx.Node) -> list[fx.Node]:
    """`node` and every later node that may share its memory, in discovery order."""
    found, queue = {node: None}, [node]
    while queue:
        current = queue.pop()
        for user in current.users:
            if user not in found and current in aliased_inputs(user):
                found[user] = None
                queue.append(user)
    return list(found)


def readers(node: fx.Node) -> list[fx.Node]:
    """Every node that reads the memory of `node`, through views too; the output node included."""
    seen: dict[fx.Node, None] = {}
    for alias in alias_closure(node):
        seen.update(dict.fromkeys(alias.users))
    return list(seen)


def identity_source(node: fx.Node) -> fx.Node:
    """The node that `node` repeats unchanged through views of the same shape."""
    while node.op == "call_function" and node.target in _IDENTITIES:
        source = node.args[0]
        if not isinstance(source, fx.Node) or not _same_shape(node, source):
            break
        node = source
    return node


def owned_source(node: fx.Node) -> fx.Node | None:
    """The shard, or this rank's part of a gradient, that `node` is or repeats; `None` if neither.

    A sum of such parts counts as the first of them. Its shape may be another one on other ranks.
    """
    source = identity_source(node)
    while is_call(source, _aten.add.Tensor):
        left, right = (*source.all_input_nodes, source)[:2]
        if not _same_shape(left, source) or not _is_owned(identity_source(right)):
            return None
        source = identity_source(left)
    return source if _is_owned(source) else None


def only_returned(wait: fx.Node) -> bool:
    """Whether nothing but identities of a value, and the output, read it."""
    queue = [wait]
    while queue:
        for user in queue.pop().users:
            if user.op == "output":
                continue
            if identity_source(user) is user:
                return False
            queue.append(user)
    return True


def _is_owned(node: fx.Node) -> bool:
    is_shard = node.op == "placeholder" and facts(node).role is Role.SHARD
    return is_shard or is_call(node, REDUCE_GRAD, REDUCE_WAIT)


def cast_to(node: fx.Node) -> torch.dtype | None:
    """The dtype to which `node` casts, if it does nothing else; `None` otherwise."""
    value = node.meta.get("val")
    casts = node.op == "call_function" and node.target in _CASTS and set(node.kwargs) <= {"dtype"}
    return value.dtype if casts and isinstance(value, Tensor) else None


def is_impure(node: fx.Node) -> bool:
    """Whether `node` draws random numbers, or does more than return a value."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags or node.is_impure()


def keeps_random_state(node: fx.Node) -> bool:
    """Whether `node` is of those with which recomputation draws the same numbers again."""
    return "rng_state" in str(node.target)


def is_symbol(node: fx.Node) -> bool:
    """Whether the value of `node` is a number: a size, say, or what was read off a tensor."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def is_getitem(node: fx.Node) -> bool:
    """Whether `node` is one of the several values of another node."""
    return getattr(node.target, "__name__", "") == "getitem"


@functools.cache
def _schema_aliases(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    return schema is not None and any(value.alias_info is not None for value in schema.returns)


def _same_storage(one: fx.Node, other: fx.Node) -> bool:
    left, right = one.meta.get("val"), other.meta.get("val")
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return False
    if left.layout != torch.strided or right.layout != torch.strided:
        return False
    return shares_storage(left, right)


def _same_shape(one: fx.Node, other: fx.Node) -> bool:
    left, right = one.meta.get("val"), other.meta.get("val")
    return isinstance(left, Tensor) and isinstance(right, Tensor) and same_shape(left, right)

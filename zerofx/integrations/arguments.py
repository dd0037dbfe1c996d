"""`TrainingArguments`: transformers' own, whose file of DeepSpeed is read by zerofx."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import transformers


@dataclasses.dataclass
class TrainingArguments(transformers.TrainingArguments):
    """transformers' own, whose `--deepspeed FILE` is for zerofx: DeepSpeed need not be there.

    Keys that the file gives as "auto" are those of the other arguments.

    Attributes:
        zero_file: the file, as `deepspeed` names it; in a program also its content.
    """

    zero_file: str | None = dataclasses.field(
        default=None, metadata={"help": "File of DeepSpeed for zerofx; --deepspeed says the same."}
    )

    def __post_init__(self) -> None:
        # transformers would import DeepSpeed and hand training over to it.
        file: Any = self.deepspeed or self.zero_file
        self.zero_file, self.deepspeed = file, None
        super().__post_init__()

    def to_dict(self) -> dict[str, Any]:
        """As transformers', with `zero_file` where there is one."""
        return {k: v for k, v in super().to_dict().items() if k != "zero_file" or v is not None}


@contextlib.contextmanager
def file_aside(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """The file that a trainer's arguments name, which these do not say meanwhile.

    Trainers that others derive make arguments of a class of their own out of those that they are
    given, and that class knows no file.
    """
    kind = transformers.TrainingArguments  # a trainer's own may have been told the file
    named: dict[int, tuple[Any, Any]] = {
        id(each): (each, file)
        for each in (*args, *kwargs.values())
        if isinstance(each, kind) and (file := getattr(each, "zero_file", None))
    }
    for each, _ in named.values():
        each.zero_file = None
    try:
        yield next((file for _, file in named.values()), None)
    finally:
        for each, file in named.values():
            each.zero_file = file

"""How a file was understood, in lines."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence

from rich.console import Console
from rich.table import Column, Table

from zerofx.config import ZeroConfig
from zerofx.integrations.deepspeed.settings import Row


def table_of(rows: Sequence[Row]) -> list[str]:
    """A line for each key, or more where texts are long."""
    keys = Column("key", no_wrap=True)
    table = Table(keys, "given", "taken as", "meaning", box=None, pad_edge=False)
    for row in rows:
        table.add_row(row.key, str(row.given), row.taken, row.meaning.replace("`", ""))
    text = io.StringIO()
    width = 100 + max((len(row.key) for row in rows), default=0)
    Console(file=text, width=width, markup=False, highlight=False).print(table)
    return [line.rstrip() for line in text.getvalue().splitlines()]


def options_of(config: ZeroConfig) -> list[str]:
    """A line for the stage, and for each option that is not what it is by default."""
    plain = ZeroConfig()
    given = {field.name: getattr(config, field.name) for field in dataclasses.fields(plain)}
    shown = {name: value for name, value in given.items() if value != getattr(plain, name)}
    shown = {"stage": config.stage, **shown}
    shown["passes"] = [getattr(each, "new", each) for each in config.passes]
    return [f"option {name}: {value}" for name, value in shown.items() if value != []]

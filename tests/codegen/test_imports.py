"""CPU ranks never need Triton, and zerofx never imports it there."""

from __future__ import annotations

import subprocess
import sys
import textwrap

_PROGRAM = """
    import sys

    importers = []

    class NoTriton:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] != "triton":
                return None
            frame = sys._getframe(1)
            while frame is not None:
                importers.append(frame.f_globals.get("__name__", ""))
                frame = frame.f_back
            raise ModuleNotFoundError("there is no Triton here")

    sys.meta_path.insert(0, NoTriton())
    import pathlib, torch, zerofx
    import zerofx.frontend.backend
    from zerofx.codegen.kernels import kernel_for
    from zerofx.ir.kernels import Pack, Unpack
    from zerofx.ir.parcels import Codec, Member, Parcels
    from zerofx.codegen.emit import emit

    parcels = Parcels((Member("x", 600, 300, torch.float32),), Codec("int4", 64), 2)
    wire = torch.empty(parcels.shape, dtype=torch.uint8)
    x, back = torch.randn(600), torch.empty(600)
    device, folder = torch.device("cpu"), pathlib.Path("nowhere")
    kernel_for(Pack(parcels), device, folder)([x], [wire], 0)
    kernel_for(Unpack(parcels), device, folder)([wire[None]], [back], 0)
    assert (x - back).norm() < 0.2 * x.norm()
    assert "def pack" in emit(Pack(parcels))
    assert "triton" not in sys.modules and not folder.exists()
    ours = [name for name in importers if name.startswith("zerofx.codegen")]
    assert not ours, ours
"""


def test_reference_kernels_run_without_triton() -> None:
    program = textwrap.dedent(_PROGRAM)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr

"""A program as one Python file that runs on its own: aten calls and plain `torch.distributed`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

from zerofx.frontend import plain_codes, plain_ops
from zerofx.frontend.plain_graph import PlainGraph
from zerofx.ir.program import Program

_HEAD = '''"""The {region} program of stage {stage}, as zerofx runs it.

Written by zerofx, of which it needs {needs}. Every rank runs it:

    torchrun --nproc-per-node {ranks} program.py INPUTS OUTPUTS [SEED]

INPUTS/rank0.pt, rank1.pt, … hold a list each, saved with `torch.save`, in this order:

{inputs}

A mesh is not read: None will do. What the program returns is saved in OUTPUTS in the same way.
SEED is for torch's default generator, from which random numbers come.
"""
'''
_OWN = r"zerofx_frontend_plain_(?:ops|codes)_"
_KERNEL_NAMES = """from zerofx.ir.kernels import Pack, Repack, Unpack
from zerofx.ir.parcels import Codec, Member, Parcels
"""


def standalone(program: Program) -> str:
    """The text of the file.

    Args:
        program: in its final form, as it was traced on this rank.

    Raises:
        UnsupportedError: it holds a large constant, a subgraph of a higher-order operator, or
            communication that cannot be repeated (over a group of some ranks that the model
            names; of codes that earlier ones decide); the node is named.
    """
    plain = PlainGraph(program)
    layouts = [spec.layout for spec in program.params.values()]
    inputs = [name.replace("\\", r"\\") for name in plain.inputs]
    head = _HEAD.format(
        region=program.region.value,
        needs="the kernels' reference" if plain.sends_codes else "nothing",
        stage=program.stage,
        ranks=max((each.num_ranks for each in layouts), default=1),
        inputs="\n".join(f"    {place:3}  {name}" for place, name in enumerate(inputs)),
    )
    communication = inspect.getsource(plain_ops).partition('"""\n\n')[2]
    if plain.sends_codes:
        communication += _codes_text()
    code = plain.made.python_code("constants", verbose=True)
    known = {"torch", "device", "inf", "nan", "NoneType", "fx_pytree", "pytree"}
    imports = ["import torch._inductor.inductor_prims\n"] if ".inductor_" in code.src else []
    imports += [
        f"from {thing.__module__} import {thing.__qualname__} as {name}\n"
        for name, thing in sorted(code.globals.items())
        if name not in known and not re.match(_OWN, name)
    ]
    return "".join(
        [
            f"{head}\n{communication}\n\n",
            *imports,
            'device, inf, nan = torch.device, float("inf"), float("nan")\n',
            f"CONSTANTS = SimpleNamespace({', '.join(plain.constants)})\n\n\n",
            *_body(code.src, plain.modules),
            '\n\nif __name__ == "__main__":\n    run(program, CONSTANTS)\n',
        ]
    )


def _codes_text() -> str:
    """`plain_codes` as it stands behind `plain_ops`, with the names that constants need."""
    text = inspect.getsource(plain_codes).partition("annotations\n")[2]
    imports, _, rest = re.sub(r"from zerofx.frontend.plain_ops .*\n", "", text).partition("\n\n\n")
    return f"{imports}\n{_KERNEL_NAMES}\n\n{rest}"


def _body(source: str, modules: dict[str, str]) -> Iterator[str]:
    """The function, with a comment wherever the next lines belong to another module."""
    module = ""
    for line in re.sub(_OWN, "", source).splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if line.startswith("def "):
            # Annotations are strings, which may hold commas.
            inputs = re.findall(r'\w+(?:: "[^"]*")?', line.partition("(self")[2])
            yield "def program(\n    constants,\n" + "".join(f"    {each},\n" for each in inputs)
            yield "):\n"
            continue
        name = re.match(r"\s*(\w+)", line)
        place = modules.get(name.group(1), "") if name is not None else ""
        if place and place != module:
            module = place
            yield f"    # {module}\n"
        yield _without_result(line) + "\n"


def _without_result(line: str) -> str:
    """`free` and its like return nothing."""
    call = re.match(r"(\s+)(\w+) = ((?:free|keep|sync_buffers)\(.*?\))(.*)", line)
    if call is None:
        return line
    indent, name, text, rest = call.groups()
    rest = rest.replace(f"{name} = ", "")
    return indent + text + ("" if rest == ";  None" else rest)

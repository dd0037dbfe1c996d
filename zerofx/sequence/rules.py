"""What operations become where an operand is cut: a table of families, and a rule for each.

A rule edits a node and says how its result is cut. `None` means that it cannot tell, and the
operation is given whole values: that is always right, and costs memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, fx

from zerofx.sequence.attention import attend
from zerofx.sequence.cuts import Cut, through_reshape, through_view
from zerofx.sequence.equations import PRODUCTS, by_equation, pointwise
from zerofx.sequence.graph import Editor, Result
from zerofx.sequence.losses import divide_loss
from zerofx.sequence.operations import Kernels, argument, call, is_torchs, name_of
from zerofx.torch_private import tensors_in, total

_RESHAPES = ("view", "reshape", "flatten", "unflatten", "ravel", "view_as", "reshape_as")
_EXPANSIONS = ("expand", "expand_as", "broadcast_to")
_ALONG: dict[str, tuple[int, Any]] = {
    **dict.fromkeys(("softmax", "log_softmax", "softmin", "logsumexp"), (1, None)),
    **dict.fromkeys(("cumsum", "cumprod", "all", "any", "argmax", "argmin"), (1, None)),
    **dict.fromkeys(("sum", "mean", "amax", "amin", "prod", "var", "std", "max", "min"), (1, None)),
    **dict.fromkeys(("sort", "argsort", "glu"), (1, -1)),
    **dict.fromkeys(("cat", "concat", "stack"), (1, 0)),
    **dict.fromkeys(("layer_norm", "rms_norm"), (1, None)),
    **dict.fromkeys(("gather", "scatter", "scatter_"), (1, None)),
    "topk": (2, -1),
    "normalize": (2, 1),
    "repeat_interleave": (2, None),
    "view_as_complex": (1, -1),
    "view_as_real": (1, range(0)),
    "one_hot": (2, range(0)),
}
"""Operations along dimensions, which leave others alone: the place of `dim`, and its default."""

_INDEXED = ("gather", "scatter", "scatter_")
"""All operands have the same dimensions."""

_OPTIONS = frozenset(
    (
        *("input", "dim", "axis", "keepdim", "dtype", "correction", "unbiased", "_stacklevel"),
        *("largest", "sorted", "stable", "descending", "num_classes", "output_size", "p"),
        *("normalized_shape", "weight", "bias", "eps"),
    )
)
"""Of these, that may be given by name."""

_FACTORIES = ("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor")


def divide_node(at: Editor, node: fx.Node, kernels: Kernels | None) -> Result | None:
    """Let an operation with a cut operand work on this rank's part, if a rule allows it."""
    name = name_of(node)
    if name == "setitem":
        return None
    if not tensors_in(at.whole(node)):
        return _number(at, node)
    if name in _FACTORIES:
        return node, None
    if (rule := _NAMED.get(name)) is not None and (done := rule(at, node)) is not None:
        return done
    if name in _NAMED and name not in ("max", "min", "getitem"):
        return None
    # What others wrote may have a gradient of another kind.
    if kernels is None or not is_torchs(node):
        return None
    if not kernels.written and (done := _view(at, node, name)) is not None:
        return done
    return _pointwise(at, node, kernels) if kernels.is_pointwise else None


def _number(at: Editor, node: fx.Node) -> Result | None:
    """`x.size()` and the like are those of the whole."""
    value = at.whole(node)
    known = isinstance(value, (int, tuple, torch.device, torch.dtype))
    return (at.replace(node, _constant, (value,)), None) if known else None


def _constant(value: Any) -> Any:
    return value


def _product(at: Editor, node: fx.Node) -> Result | None:
    return by_equation(at, node, PRODUCTS[name_of(node)])


def _embedding(at: Editor, node: fx.Node) -> Result | None:
    counts = argument(node, 5, "scale_grad_by_freq", False)  # words of the whole sequence
    return None if counts else _product(at, node)


def _einsum(at: Editor, node: fx.Node) -> Result | None:
    equation = str(node.args[0]).replace(" ", "").replace("...", "*")
    unknown = "->" not in equation or ("*" in equation and not equation.islower())
    return None if unknown else by_equation(at, node, equation)


def _pointwise(at: Editor, node: fx.Node, kernels: Kernels) -> Result | None:
    operands, results = at.operands(node), tensors_in(at.whole(node))
    shape = torch.broadcast_shapes(*(at.shape(each) for each in operands))
    if any(result.shape != shape for result in results):
        return None
    if len(kernels.written) > 1:
        return None  # they may be cut differently
    lead = operands[kernels.written[0]] if kernels.written else None
    before = node.args, node.kwargs
    done = by_equation(at, node, pointwise(len(operands)), lead)
    if done is not None and not at.fits(*done):  # it names a length, as `sum_to_size` does
        node.args, node.kwargs = before
        return None
    return done


def _convert(at: Editor, node: fx.Node) -> Result:
    """Of another tensor only dtype and device are taken."""
    return node, at.cut(at.operands(node)[0])


def _reshape(at: Editor, node: fx.Node) -> Result | None:
    source, after = at.operands(node)[0], at.shape(node)
    cut, before = at.cut(source), at.shape(source)
    if cut is None or at.whole(source).dtype != at.whole(node).dtype:
        return None
    found = through_reshape(cut, before, after, at.place.size)
    if found is None:
        return None
    return at.replace(node, "reshape", (source, found.local(after, at.place.size))), found


def _view(at: Editor, node: fx.Node, name: str) -> Result | None:
    """Views of other dimensions keep a cut, wherever it goes."""
    operands = at.operands(node)
    cut = at.cut(operands[0])
    if (len(operands) != 1 and name not in _EXPANSIONS) or cut is None:
        return None

    def view(probe: Tensor) -> Any:
        return call(node, *at.concrete(node, {operands[0]: probe}))

    try:
        with at.mode:
            found = through_view(cut, at.whole(operands[0]), view)
    except RuntimeError:  # no view of a tensor that lies so
        return None
    if found is None:
        return None
    if name not in _EXPANSIONS:  # arguments may be positions, or a length: those of the whole
        return (node, found) if at.fits(node, found) else None
    local = found.local(at.shape(node), at.place.size)
    return at.replace(node, "expand", (operands[0], local)), found


def _along(at: Editor, node: fx.Node) -> Result | None:
    """What acts along other dimensions works on parts; sums along the cut one are added up."""
    name = name_of(node)
    first: Any = argument(node, 0, "input", None)
    many: list[fx.Node] = list(first) if isinstance(first, (list, tuple)) else [first]
    if name in _INDEXED:
        many = at.operands(node)
    lead = next((each for each in many if at.cut(each) is not None), None)
    by_node = isinstance(argument(node, 1, "dim", 0), fx.Node)
    if lead is None or by_node or node.kwargs.keys() - _OPTIONS:
        return None
    cut, ndim = cast(Cut, at.cut(lead)), len(at.shape(lead))
    after = tensors_in(at.whole(node))[0].ndim
    dims = _dims(node, name, after if name == "stack" else ndim)
    if cut.dim in dims and name != "stack":
        return _add_up(at, node, name)
    size = at.shape(lead)[cut.dim]
    if name in _INDEXED and any(at.shape(each)[cut.dim] != size for each in many):
        return None
    replaced = {each: at.aligned(each, cut, size) for each in many}
    others = [each for each in at.operands(node) if each not in replaced]
    replaced |= {each: at.gathered(each) for each in others}
    at.set_operands(node, [replaced[each] for each in at.operands(node)])
    if name == "stack":
        return node, Cut(cut.dim + (min(dims) <= cut.dim), cut.outer)
    gone = sum(dim < cut.dim for dim in dims) if after < ndim else 0
    return node, Cut(cut.dim - gone, cut.outer)


def _dims(node: fx.Node, name: str, ndim: int) -> set[int]:
    place, default = _ALONG[name]
    given: Any = argument(node, place, "dim", node.kwargs.get("axis", default))
    if name in ("layer_norm", "rms_norm"):
        shape: Any = argument(node, 1, "normalized_shape", ())
        given = range(-len(shape), 0)
    # `x.var(False)`; an empty list is no dimension to `any` and `all`, to others all dimensions.
    if given is None or isinstance(given, bool) or (isinstance(given, (list, tuple)) and not given):
        return set(range(ndim))
    return {dim % ndim for dim in ((given,) if isinstance(given, int) else given)}


def _add_up(at: Editor, node: fx.Node, name: str) -> Result | None:
    if name not in ("sum", "mean"):
        return None
    if name == "mean":
        node = at.after(node, torch.div, lambda value: (value, at.place.size))
    return at.after(node, total, lambda value: (value, at.place.group)), None


def _repeat(at: Editor, node: fx.Node) -> Result | None:
    times: Any = node.args[1] if isinstance(node.args[1], (list, tuple)) else node.args[1:]
    source = at.operands(node)[0]
    cut = at.cut(source)
    if cut is None or node.kwargs:
        return None
    dim = cut.dim + len(times) - len(at.shape(source))
    return (node, Cut(dim, cut.outer)) if times[dim] == 1 else None


def _lookup(at: Editor, node: fx.Node) -> Result | None:
    """`table[ids]` of a whole table."""
    operands = at.operands(node)
    if len(operands) != 2 or node.args[1] is not operands[1]:
        return None
    if at.whole(operands[1]).dtype is torch.bool:
        return None
    row = "abcdefgh"[: len(at.shape(operands[0])) - 1]
    return by_equation(at, node, f"v{row},*->*{row}")


_NAMED: dict[str, Callable[[Editor, fx.Node], Result | None]] = {
    **dict.fromkeys(PRODUCTS, _product),
    "embedding": _embedding,
    **dict.fromkeys(("to", "type_as"), _convert),
    **dict.fromkeys(_RESHAPES, _reshape),
    **dict.fromkeys(_ALONG, _along),
    "einsum": _einsum,
    "repeat": _repeat,
    "getitem": _lookup,
    "scaled_dot_product_attention": attend,
    "cross_entropy": divide_loss,
    "nll_loss": divide_loss,
}

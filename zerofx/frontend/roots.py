"""Which model is being compiled: read off the Python call stack, never from local variables."""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Collection, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zerofx.config import ZeroConfig
from zerofx.errors import ShardingError
from zerofx.frontend.running import compiled_methods, compiled_module, running_modules
from zerofx.runtime.params import held_by
from zerofx.runtime.session import Session
from zerofx.sharding.casts import needs_cast
from zerofx.sharding.refuse import refuse_wrappers
from zerofx.torch_private import unwrap_compiled

_REMEDY = (
    "shard the whole model before its first forward: "
    "import zerofx; zerofx.shard(model, zerofx.ZeroConfig(stage=…))"
)
_FUNCTION = "a compiled function that calls modules, or several models in one graph"
_REGISTER = "put it in an nn.ModuleList or nn.ModuleDict, so that the model has its parameters"


def to_be_sharded(inputs: Sequence[Any]) -> list[nn.Parameter]:
    """Plain parameters of a graph, but for those of a frozen model that no running module owns.

    A distillation keeps its teacher in a list, say: each rank has it whole, as beside
    DistributedDataParallel. Should it train later, the graph is compiled anew.

    Args:
        inputs: of the graph.
    """
    plain = [v for v in inputs if isinstance(v, nn.Parameter) and not isinstance(v, DTensor)]
    if all(param.requires_grad for param in plain):
        return plain
    running = [module for _, module in running_modules()]
    owned = {id(param) for module in running for _, param in _params(module)}
    found = [param for param in plain if param.requires_grad or id(param) in owned]
    # A frozen model alone, in a compiled function, was meant to be sharded.
    beside = found or running or any(isinstance(value, DTensor) for value in inputs)
    return found if beside else plain


def find_root(plain: Sequence[nn.Parameter], compiled: nn.Module | None = None) -> nn.Module:
    """The outermost module on the call stack that owns every plain parameter of the graph.

    Args:
        plain: parameters that Dynamo's graph reads and that are not sharded yet.
        compiled: the module that `torch.compile` was given; `None`: as the stack says.

    Raises:
        ShardingError: no running module owns them all; an outer module, which owns more, is
            running eagerly; or this forward used some of them already.
        UnsupportedError: a module on the stack is DistributedDataParallel or the like.
    """
    wanted = {id(param) for param in plain}
    frames = list(running_modules())
    if not any(wanted <= _owned(module) for _, module in frames):
        frames += [(frame, module) for frame, module, _ in compiled_methods()]
    modules = [module for _, module in frames]
    refuse_wrappers(modules)
    owners = [module for module in modules if wanted <= _owned(module)]
    if not owners:
        strange = modules and all(wanted.isdisjoint(_owned(module)) for module in modules)
        why = "a module in a plain list or dict" if strange else _FUNCTION
        raise ShardingError(
            f"the compiled code reads parameters that no module on the call stack owns ({why})",
            _REGISTER if strange else _REMEDY,
            [f"a parameter of shape {tuple(param.shape)}" for param in plain],
        )
    if compiled is None:
        compiled = compiled_module(frames)
    if compiled is not None:
        owners = _that_train(owners, compiled) or owners
    outer = owners[-1]
    # A wrapper around the compiled model owns just the same parameters: the model is the root. It
    # is not if more than the model holds one of them, as a tied head does.
    places = _places(outer)
    root = next(module for module in owners if _places(module) == places)
    if compiled is not None and _owned(compiled) != _owned(outer):
        raise ShardingError(
            f"{type(compiled).__name__} is compiled while {type(outer).__name__}, which owns more "
            "parameters, runs its forward without zerofx",
            _REMEDY,
        )
    _refuse_used(root, frames)
    return root


def find_compiled_module() -> nn.Module | None:
    """The module that `torch.compile` was given; `None` if it was given a function."""
    return compiled_module(list(running_modules()))


def refuse_late_casts(root: nn.Module, config: ZeroConfig) -> None:
    """Refuse to shard `root` in the middle of a forward whose border should have cast.

    Raises:
        ShardingError: the call that is running was entered before zerofx knew the model, with
            arguments that `param_dtype` casts, or with `output_dtype` set.
    """
    for frame, module, method in compiled_methods():
        if module is root and method and (late := _late_casts(frame, config)):
            raise ShardingError(
                f"not {type(root).__name__} was compiled but its method {method}, at whose border "
                f"nothing is cast ({late})",
                "compile the model itself, and once: torch.compile(model, …)",
            )
    for frame, module in running_modules():
        if module is not root or frame.f_locals.get("self") is not root:
            continue
        if frame.f_code.co_name != "_call_impl":
            continue  # Dynamo traces the call itself anew, hooks included
        if late := _late_casts(frame, config):
            raise ShardingError(
                f"the first forward of {type(root).__name__} is running already, so that its "
                f"border casts nothing ({late})",
                "shard before the first forward, with the same options: "
                "zerofx.shard(model, zerofx.ZeroConfig(stage=…, …))",
            )


def _late_casts(frame: FrameType, config: ZeroConfig) -> str:
    """The options that ask for casts at the border of the call that runs in `frame`."""
    given = frame.f_locals["args"], frame.f_locals["kwargs"]
    dtype = config.param_dtype if config.cast_forward_inputs else None
    late = ["cast_forward_inputs"] if dtype is not None and needs_cast(given, dtype) else []
    return ", ".join([*late, *(["output_dtype"] if config.output_dtype is not None else [])])


def find_missing_roots(sessions: Iterable[Session]) -> None:
    """Find the model of each session that was copied or unpickled: it says nothing of its root.

    It is the smallest live module that owns every parameter of the session.
    """
    lost = [session for session in sessions if session.root() is None and session.states]
    modules = live_modules() if lost else []
    for session in lost:
        wanted = {id(state.param) for state in session.states}
        owners = [module for module in modules if wanted <= _owned(module)]
        if owners:
            session.set_root(min(owners, key=lambda module: len(list(module.modules()))))


def live_modules() -> list[nn.Module]:
    """Every module of this process."""
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
    # A constructor that failed leaves half of one, which a traceback may keep.
    return [module for module in found if "_modules" in vars(module)]


def names_of(wanted: Collection[int], modules: Iterable[nn.Module]) -> list[str]:
    """The longest qualified name of each parameter that `modules` own.

    Args:
        wanted: ids of the parameters.
        modules: such as `live_modules` finds.
    """
    found: dict[int, str] = {}
    for module in modules:
        # What torch.compile returns is a module, too; users know the one in it.
        for name, param in _params(unwrap_compiled(module)):
            if id(param) in wanted and len(name) > len(found.get(id(param), "")):
                found[id(param)] = name
    return sorted(found.values())


def refuse_running_wrappers() -> None:
    """Refuse to compile inside DistributedDataParallel and its like.

    Raises:
        UnsupportedError: names the wrapper.
    """
    refuse_wrappers(module for _, module in running_modules())


def _params(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Its parameters, whatever methods of its own take and give."""
    return nn.Module.named_parameters(module)


def _owned(module: nn.Module) -> set[int]:
    return {id(param) for _, param in _params(module)}


def _that_train(owners: list[nn.Module], compiled: nn.Module) -> list[nn.Module]:
    """`owners` but for those that own more than the compiled model, of which nothing trains.

    A task of timm holds an average of the model, and a distillation a teacher: each rank has them
    whole, as beside DistributedDataParallel. They are frozen, or the optimizers that are there
    leave them out; the guard of optimizers' steps finds whatever takes them in later.
    """
    own = _owned(compiled)
    added = [[param for _, param in _params(each) if id(param) not in own] for each in owners]
    asked = any(param.requires_grad for params in added for param in params)
    stepped = _stepped_over() if asked else set[int]()

    def train(params: list[nn.Parameter]) -> bool:
        left_out = bool(stepped & own) and not any(id(param) in stepped for param in params)
        return not left_out and any(param.requires_grad for param in params)

    pairs = zip(owners, added, strict=True)
    return [module for module, params in pairs if not params or train(params)]


def _stepped_over() -> set[int]:
    optimizers = [thing for thing in gc.get_objects() if issubclass(type(thing), Optimizer)]
    return {id(param) for each in optimizers for param in held_by(each)}


def _places(module: nn.Module) -> set[tuple[int, str]]:
    """Where parameters are held: the submodule, by `id`, and the name there."""
    return {
        (id(each), name)
        for each in module.modules()
        # A module's own `named_parameters` may take nothing, and give what it likes.
        for name, _ in nn.Module.named_parameters(each, recurse=False)
    }


def _refuse_used(root: nn.Module, frames: Sequence[tuple[FrameType, nn.Module]]) -> None:
    """Refuse if a value of the forward under way depends on plain parameters already.

    Its backward would need full values that sharding frees.
    """
    last = next(frame for frame, module in reversed(frames) if module is root)
    names = {id(param): name for name, param in _params(root) if not isinstance(param, DTensor)}
    used: dict[str, None] = {}
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        for value in _tensors(frame.f_locals.values()):
            used.update(dict.fromkeys(_parameters_behind(value, names)))
        if frame is last:
            break
    if used:
        raise ShardingError(
            f"the forward of {type(root).__name__} used plain parameters before zerofx saw it "
            "(only parts of it are compiled, or Dynamo left it to Python)",
            _REMEDY,
            used,
        )


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (item for item in value if isinstance(item, Tensor))


def _parameters_behind(value: Tensor, names: dict[int, str]) -> Iterator[str]:
    queue, seen = [value.grad_fn], set[Any]()
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if id(variable) in names:
            yield names[id(variable)]
        queue.extend(following for following, _ in node.next_functions)

"""Turn a verified program into an executable."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import fx

from zerofx.errors import PassError
from zerofx.frontend.inner import SegmentCompiler
from zerofx.frontend.measure import Stopwatch
from zerofx.frontend.places import Places
from zerofx.frontend.quantize import MakeKernel, gathering, reducing
from zerofx.frontend.segments import Segment, split
from zerofx.ir import ops
from zerofx.ir.facts import facts
from zerofx.ir.program import Program
from zerofx.ir.spec import Region
from zerofx.runtime.execute import Executable, Register, Step
from zerofx.runtime.handles import domain_of
from zerofx.torch_private import inputs_written, lookup_seed_op

Run = Callable[[list[Any]], Any]


def lower(
    program: Program,
    compiler: SegmentCompiler,
    kernels: MakeKernel,
    watch: Stopwatch | None = None,
) -> Executable:
    """Bind communication nodes to the runtime and compile the segments between them.

    Args:
        program: verified.
        compiler: of the segments.
        kernels: makes those that quantize.
        watch: times the steps of one run.

    Raises:
        PassError: a marker is left, which no pass turned into communication.
    """
    left = [facts(node).param for node in program.calls(ops.UNSHARD, ops.REDUCE_GRAD)]
    if left:
        raise PassError(
            f"the {program.region.value} program still holds markers",
            "keep the passes insert_unshards and insert_reduces",
            left,
        )
    graph = program.graph
    pieces = split(graph)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    number = {node: index for index, node in enumerate(inputs)}
    for piece in pieces:
        for node in _made_by(piece):
            number[node] = len(number)
    last = _last_readers(program, pieces)
    backward = program.region is Region.BACKWARD
    places = Places(program)
    segments = [piece for piece in pieces if isinstance(piece, Segment)]
    compiled = iter(compiler.compile(segments, is_backward=backward))
    steps = list(_making_room(program))
    for index, piece in enumerate(pieces):
        read, made = _read_by(piece), _made_by(piece)
        if isinstance(piece, Segment):
            run = next(compiled)
        else:
            run = _bind(piece, program, kernels)
        if watch is not None:
            run = watch.around(piece, run)
        steps.append(
            Step(
                run,
                inputs=tuple(number[node] for node in read),
                outputs=tuple(number[node] for node in made),
                drops=tuple(number[n] for n in (*read, *made) if last.get(n, -1) == index),
                many=isinstance(piece, Segment),
                place=places(piece, index),
            )
        )
    outputs = [Register(number[v]) if isinstance(v, fx.Node) else v for v in program.outputs]
    # Segments also read symbols that only the shapes of their values mention.
    unread = [number[node] for node in inputs if node not in last and node not in program.outputs]
    alone = all(spec.layout.num_ranks == 1 for spec in program.params.values())
    # Means of one rank are the gradients themselves, which the user may clip in place.
    return Executable(steps, len(inputs), len(number), outputs, unread, apart=backward and alone)


def _making_room(program: Program) -> Iterator[Step]:
    """What comes before all else in a program that keeps values."""
    sizes = dict[int, int]()
    for node in program.calls(ops.KEEP):
        handle = _handle(node, 2)
        sizes[handle] = sizes.get(handle, 0) + program.full_bytes(node)
    for handle, size in sizes.items():
        yield Step(_room_in(handle, size), inputs=(), outputs=(), drops=(), many=False)


def _room_in(handle: int, size: int) -> Run:
    return lambda args: domain_of(handle).session.kept.make_room(size)


def _read_by(piece: fx.Node | Segment) -> tuple[fx.Node, ...]:
    return piece.inputs if isinstance(piece, Segment) else tuple(piece.all_input_nodes)


def _made_by(piece: fx.Node | Segment) -> tuple[fx.Node, ...]:
    return piece.outputs if isinstance(piece, Segment) else (piece,)


def _last_readers(program: Program, pieces: Iterable[fx.Node | Segment]) -> dict[fx.Node, int]:
    """For each value that is not returned, the piece after which nobody reads it."""
    returned = {value for value in program.outputs if isinstance(value, fx.Node)}
    last: dict[fx.Node, int] = {}
    for index, piece in enumerate(pieces):
        last.update((node, index) for node in _read_by(piece) if node not in returned)
    return last


def _bind(node: fx.Node, program: Program, kernels: MakeKernel) -> Run:
    """The runtime call behind a communication node; its tensor arguments come in a list.

    Domains are looked up at every call: Dynamo may keep a program longer than the user keeps the
    model, whose memory must not live on with it. The nodes of an exact program are not kept.
    """
    region = program.region
    match node.target:
        case ops.UNSHARD_START:
            return _bind_gather(node, program, kernels)
        case ops.UNSHARD_WAIT:
            handle, member, size = *_member(node, 1), _size(node)
            return lambda args: domain_of(handle).unshard_wait(args[0], member, size)
        case ops.KEEP:
            handle = _handle(node, 2)
            return lambda args: domain_of(handle).keep(*args)
        case ops.KEEP_SHARD:
            handle = _handle(node, 2)
            return lambda args: domain_of(handle).keep_shard(*args)
        case ops.FREE:
            handle = _handle(node, 1)
            return lambda args: domain_of(handle).free(args[0])
        case ops.REDUCE_START:
            handle, given, shards = _handle(node, 2), _places(node, 0), _places(node, 1)
            codes = reducing(program, node, kernels)
            return lambda args: domain_of(handle).reduce_start(
                [args[place] for place in given], [args[place] for place in shards], codes
            )
        case ops.REDUCE_WAIT:
            handle, member, dtype = *_member(node, 2), node.meta["val"].dtype
            return lambda args: domain_of(handle).reduce_wait(args[0], member, args[1], dtype)
        case ops.SYNC_BUFFERS:
            handle, part, changed = _handle(node, 1), object(), inputs_written(program.graph)
            written = [at for at, buffer in enumerate(node.all_input_nodes) if buffer in changed]
            return lambda args: domain_of(handle).sync_buffers(args, part, region, written)
        case op if op is lookup_seed_op():
            index = node.args[1]
            return lambda args: args[0][index]
        case _:
            raise PassError(f"no runtime for {node.target}", "report this", [node.name])


def _bind_gather(start: fx.Node, program: Program, kernels: MakeKernel) -> Run:
    """Sizes and dtypes stand at the waits; verified programs have one for each member."""
    codes = gathering(program, start, kernels)
    handle, shards, region = _handle(start, 1), _places(start, 0), program.region
    waits, keep = ops.waits_of(start), ops.keeps_codes(start)
    sizes, dtypes = [_size(wait) for wait in waits], [ops.full_dtype(wait) for wait in waits]
    return lambda args: domain_of(handle).unshard_start(
        [args[place] for place in shards], sizes, dtypes, region, codes, keep=keep
    )


def _places(node: fx.Node, position: int) -> list[int]:
    """For each node of a list argument, where its value stands among the distinct inputs."""
    inputs, given = node.all_input_nodes, node.args[position]
    assert isinstance(given, (list, tuple))
    return [inputs.index(each) for each in given if isinstance(each, fx.Node)]


def _member(wait: fx.Node, handle_at: int) -> tuple[int, int]:
    """Layout handle of the collective that is waited for, and which of its members."""
    start, shard = ops.started_by(wait), wait.args[1]
    assert isinstance(shard, fx.Node)
    return _handle(start, handle_at), ops.members(start).index(shard)


def _handle(node: fx.Node, position: int) -> int:
    handle = node.args[position]
    assert isinstance(handle, int)
    return handle


def _size(wait: fx.Node) -> tuple[int, ...]:
    size = wait.args[2]
    assert isinstance(size, (list, tuple))
    return tuple(int(extent) for extent in size)  # pyright: ignore[reportArgumentType]

"""From a Dynamo graph to running programs: trace, annotate, cut, transform, lower."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from zerofx.config import ZeroConfig
from zerofx.cost.machine import machine_of
from zerofx.cost.micro_batches import MicroBatches
from zerofx.errors import UnsupportedError
from zerofx.frontend.aliases import views_outside
from zerofx.frontend.annotate import GraphInputs, annotate
from zerofx.frontend.bodies import write_out_regions
from zerofx.frontend.dump import Dump, dump_for, run_told
from zerofx.frontend.dump_place import place_of
from zerofx.frontend.inner import SegmentCompiler
from zerofx.frontend.joint import trace_only
from zerofx.frontend.kept_reads import copies_kept
from zerofx.frontend.lower import lower
from zerofx.frontend.measure import Stopwatch
from zerofx.frontend.partition import Traced, repeat_constants
from zerofx.frontend.predict import Setting
from zerofx.frontend.quantize import kernels_of
from zerofx.frontend.reads import read_whole, refuse_uses, returned
from zerofx.frontend.shards import take_shards
from zerofx.frontend.watch import GraphWatcher
from zerofx.frontend.weigh import decided, dumps, loads, weigh
from zerofx.ir.facts import facts
from zerofx.ir.ops import UNSHARD
from zerofx.ir.program import Program
from zerofx.ir.spec import ParamSpec, Region
from zerofx.ir.view import computes_in
from zerofx.passes.base import Pass
from zerofx.passes.pipelines import pipeline
from zerofx.runtime.handed_out import hand_out, taking_tensors
from zerofx.runtime.session import Session
from zerofx.sequence.cuts import Cut, Place
from zerofx.sequence.divide import divide
from zerofx.sequence.marks import refuse_other_samples, sequences, set_part
from zerofx.torch_private import (
    DynamoStartsAgain,
    inductor_joint_passes,
    name_of,
    trace_and_compile,
)


class Capture:
    """The programs of one Dynamo graph.

    Args:
        config: the user's choices.
        inputs: parameters and buffers among the graph's inputs.
        compiler: compiles segments.
        passes: by default those of `config`, or none for a graph without parameters.
        watcher: who wants to know of the programs besides those whom `config` names.
    """

    def __init__(
        self,
        config: ZeroConfig,
        inputs: GraphInputs,
        compiler: SegmentCompiler,
        passes: tuple[Pass, ...] | None = None,
        watcher: GraphWatcher | None = None,
    ) -> None:
        self.config = config
        # Programs outlive models in Dynamo's cache, and must not keep their memory.
        self.inputs = dataclasses.replace(inputs, sessions=())
        self._sessions = weakref.WeakSet(inputs.sessions)
        self.compiler = compiler
        session = inputs.session
        self._setting = _setting(config, session)
        if passes is None and session is not None:
            most_bytes = self._setting.machine.most_bucket_bytes
            passes = pipeline(config, most_bytes)
        self.passes: tuple[Pass, ...] = passes or ()
        self._params: dict[str, ParamSpec] = {}
        self._num_user_outputs = 0
        self._read_later: frozenset[str] = frozenset()
        self._gradients_of: tuple[str, ...] = ()
        self._watcher = watcher
        self._journal = session.journal if session else None
        self._axes = session.axes if session else None
        self._dump: Dump | None = None

    def compile(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile `module`; its backward is lowered at the first backward."""
        place = place_of(self.config.dump, self.config.mesh)
        take = place.take_number
        self._dump = dump_for(place.written, take, self.passes, self._setting)
        try:
            return self._compile(module, example_inputs)
        except DynamoStartsAgain:
            if self._dump is not None:
                place.give_back(self._dump.number)
            raise

    def _compile(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if self._dump is not None:
            self._dump.graph(module)
        write_out_regions(module)
        refuse_uses(module, self.inputs.params)
        read_whole(module, example_inputs, self.inputs.params)
        handed_out = returned(module, self.inputs.params)
        parts = self._divide(module, example_inputs)
        taken, shards_of = take_shards(
            module, example_inputs, self._params_to_take(), lambda: self._read_later
        )
        wrapped = any(isinstance(value, DTensor) for value in taken)
        head, regenerate = views_outside(module) if wrapped else (module, None)
        compiled = trace_and_compile(
            head,
            taken,
            inductor=self.config.inner == "inductor",
            forward=lambda traced, _: self._lower(traced, Region.FORWARD),
            backward=lambda traced, _: self._lower(traced, Region.BACKWARD),
            inference=self._inference,
            partition=self._partition,
        )

        def run(*args: Any) -> Any:
            outputs = compiled(*shards_of(args))
            outputs = outputs if regenerate is None else regenerate(*outputs)
            for place, position in handed_out.items():
                hand_out(args[position], outputs[place])
            for place, where in parts.items():
                set_part(outputs[place], *where)
            return outputs

        return taking_tensors(run, example_inputs)

    def _divide(self, module: fx.GraphModule, inputs: Sequence[Any]) -> dict[int, tuple[Cut, str]]:
        """With `sequence_parallel`, let the graph compute this rank's part of its sequences.

        Returns:
            How outputs that are parts are cut, and between which ranks, by position.
        """
        if self.config.sequence_parallel == 1:
            return {}
        dims = sequences(module, inputs, self.inputs.params)
        if self._axes is None:
            raise UnsupportedError(
                "sequence_parallel: a program reads no parameters of a sharded model",
                "compile the model, and with it what is computed of its outputs",
            )
        group = self._axes.sequence
        refuse_other_samples((inputs[place] for place in dims), group)
        place = Place(name_of(group), group.rank(), group.size())
        return {at: (cut, place.group) for at, cut in divide(module, dims, place).items()}

    def _params_to_take(self) -> dict[int, ParamSpec]:
        # Gradients in a dtype of their own are wrapped as if they had their parameter's.
        return {} if self.config.grad_dtype is not None else self.inputs.params

    def trace(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Traced:
        """The graph before any pass; nothing is compiled or kept.

        Args:
            module: Dynamo's graph, with markers where it reads parameters.
            inputs: its inputs, of which only shapes count.
        """
        inductor = self.config.inner == "inductor"
        return trace_only(module, inputs, self._joint, self._evaluated, inductor=inductor)

    def _partition(
        self, joint: fx.GraphModule, joint_inputs: Any, **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        traced = self._joint(joint, joint_inputs, **options)
        if self._watcher is not None:
            self._watcher.traced(traced)
        whole = self._run(joint, Region.JOINT)
        forward, backward = traced.cut(whole, verify=self.config.verify and bool(self.passes))
        self._gradients_of, self._read_later = backward.gradients_of, forward.read_later
        self._weigh(forward, backward)
        return forward.module, backward.module

    def _joint(
        self, joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any
    ) -> Traced:
        if self.config.inner == "inductor":
            with copies_kept(joint.graph, self.inputs.kept):
                inductor_joint_passes(joint)
        if computes_in(torch.float16, joint.graph):
            for session in self._sessions:
                session.scales_losses = True
        self._num_user_outputs = num_fwd_outputs
        self._params = annotate(joint.graph, self.inputs)
        program = self._program(joint, Region.JOINT)
        return Traced(program, self.inputs.kept, inputs, options)

    def _inference(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self._weigh(self._evaluated(module).program)
        return self._lower(module, Region.INFERENCE)

    def _evaluated(self, module: fx.GraphModule) -> Traced:
        if self.config.inner == "inductor":
            inductor_joint_passes(module)
        repeat_constants(module.graph)
        self._params = annotate(module.graph, self.inputs)
        self._num_user_outputs = len(self._program(module, Region.INFERENCE).outputs)
        return Traced(self._program(module, Region.INFERENCE))

    def _weigh(self, *programs: Program) -> None:
        """With `quantize="auto"`, learn whether codes pay: what rank 0 found for its sizes."""
        if self.config.quantize != "auto" or self._journal is None:
            return
        read = {facts(node).param for each in programs for node in each.calls(UNSHARD)}
        about = hashlib.sha256("\n".join(sorted(read)).encode()).hexdigest()
        question = f"quantize/{programs[0].region.value}/{about}"
        machine, fused = self._setting.machine, self._setting.fused

        def decide() -> str:
            return dumps(weigh(self.passes, programs, machine, fused=fused))

        answer = self._journal.decided_by_first_rank(question, decide)
        self.passes = decided(self.passes, loads(answer))
        if self._dump is not None:
            self._dump.use(self.passes)

    def _lower(self, module: fx.GraphModule, region: Region) -> Callable[..., Any]:
        program = self._run(module, region)
        kernels = kernels_of(self.config)
        return lower(program, self.compiler, kernels, self._stopwatch(program))

    def _stopwatch(self, program: Program) -> Stopwatch | None:
        """Times a run, if that was asked for and this rank writes the dump."""
        number, dump = self.config.measure, self._dump
        if number is None or dump is None or not dump.has_folder:
            return None
        region = program.region.value
        done = functools.partial(dump.measured, region)
        return Stopwatch(program, number, self._setting.machine.device, done)

    def _run(self, module: fx.GraphModule, region: Region) -> Program:
        program = self._program(module, region)
        run_told(program, self.passes, self._dump, check=self.config.verify)
        return program

    def _program(self, module: fx.GraphModule, region: Region) -> Program:
        later = self._read_later if region is Region.FORWARD else frozenset[str]()
        owners = self._gradients_of if region is Region.BACKWARD else ()
        number, stage = self._num_user_outputs, self.config.stage
        buffers = dict(self.inputs.buffers.values())
        return Program(region, module, self._params, stage, number, later, owners, buffers)


def _setting(config: ZeroConfig, session: Session | None) -> Setting:
    """Where the programs run: on one CPU, if there is nobody to share with."""
    fused = config.inner == "inductor"
    if session is None:
        return Setting(machine_of("cpu"), 1, fused)
    machine = machine_of(session.device.type, session.network.table)
    return Setting(machine, session.world.size, fused, MicroBatches.of(config))

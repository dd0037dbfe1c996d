"""From a Dynamo graph to running programs: trace, annotate, cut, transform, lower."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from zerofx.config import ZeroConfig
from zerofx.frontend.annotate import GraphInputs, annotate
from zerofx.frontend.inner import SegmentCompiler
from zerofx.frontend.lower import lower
from zerofx.frontend.partition import order_opaque_values, recompute_parameter_values
from zerofx.ir.program import Program
from zerofx.ir.spec import ParamSpec, Region
from zerofx.passes.base import Pass, run_passes
from zerofx.passes.pipelines import pipeline
from zerofx.torch_private import inductor_joint_passes, min_cut, trace_and_compile


class Capture:
    """The programs of one Dynamo graph.

    Args:
        config: the user's choices.
        inputs: parameters and buffers among the graph's inputs.
        compiler: compiles segments.
    """

    def __init__(self, config: ZeroConfig, inputs: GraphInputs, compiler: SegmentCompiler) -> None:
        self.config = config
        self.inputs = inputs
        self.compiler = compiler
        session = inputs.session
        handle = session.replicated.layout.handle if session else 0
        self.passes: tuple[Pass, ...] = pipeline(config, handle) if session else ()
        self.programs: dict[Region, Program] = {}
        self._params: dict[str, ParamSpec] = {}
        self._num_user_outputs = 0

    def compile(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile `module`; its backward is lowered at the first backward."""
        return trace_and_compile(
            module,
            example_inputs,
            inductor=self.config.inner == "inductor",
            forward=lambda traced, _: self._lower(traced, Region.FORWARD),
            backward=lambda traced, _: self._lower(traced, Region.BACKWARD),
            inference=self._inference,
            partition=self._partition,
        )

    def _partition(
        self, joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        if self.config.inner == "inductor":
            inductor_joint_passes(joint, joint_inputs)
        self._num_user_outputs = num_fwd_outputs
        self._params = annotate(joint.graph, self.inputs)
        self._run(joint, Region.JOINT, num_fwd_outputs)
        recompute_parameter_values(joint.graph)
        forward, backward = min_cut(joint, joint_inputs, num_fwd_outputs, options)
        order_opaque_values(forward, backward, num_fwd_outputs)
        return forward, backward

    def _inference(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if self.config.inner == "inductor":
            inductor_joint_passes(module, inputs)
        self._params = annotate(module.graph, self.inputs)
        self._num_user_outputs = len(Program(Region.INFERENCE, module, {}, 0, 0).outputs)
        return self._lower(module, Region.INFERENCE)

    def _lower(self, module: fx.GraphModule, region: Region) -> Callable[..., Any]:
        program = self._run(module, region, self._num_user_outputs)
        return lower(program, self.compiler)

    def _run(self, module: fx.GraphModule, region: Region, num_user_outputs: int) -> Program:
        program = Program(region, module, self._params, self.config.stage, num_user_outputs)
        run_passes(program, self.passes, check=self.config.verify)
        self.programs[region] = program
        return program

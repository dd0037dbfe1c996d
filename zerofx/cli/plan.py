"""`zerofx plan`: memory, traffic and step time of a model, before any device is booked."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from zerofx.cli.arguments import PARAM_DTYPES, PRECISIONS
from zerofx.cli.command import Answer
from zerofx.cli.machine import check_inputs, machine_of, num_ranks_of
from zerofx.cli.plan_text import Question, as_data, as_text, best_stage
from zerofx.cli.progress import Progress
from zerofx.cli.targets import find_target
from zerofx.config import Stage, ZeroConfig
from zerofx.cost.lines import NotAlikeError
from zerofx.cost.memory import FP32_ADAM, MIXED_ADAM
from zerofx.errors import UnsupportedError
from zerofx.frontend.planner import Plan, Planner
from zerofx.passes.pipelines import pipeline
from zerofx.passes.registry import with_registered
from zerofx.runtime.network import ranks_of_a_node

_PRECISIONS = dict(zip(PRECISIONS, (FP32_ADAM, MIXED_ADAM), strict=True))
_LENGTH = 2048
_DTYPES = {name: getattr(torch, name) for name in PARAM_DTYPES}


def run(args: argparse.Namespace, progress: Progress) -> Answer:
    """Make the plan; a check fails if nothing fits into `--memory`."""
    num_ranks = num_ranks_of(args)
    target = find_target(args.target, args.input)
    batch, length = target.sizes(args.batch, args.length, (1, _LENGTH))
    check_inputs(batch, length)
    precision = _PRECISIONS[args.precision]
    config = _config(args)
    ranks_of_a_node(config.ranks_per_node, num_ranks)  # raises for what ranks would refuse
    planner = Planner(
        build=target.build,
        inputs=target.inputs,
        config=config,
        machine=machine_of(args),
        precision=precision,
        num_ranks=num_ranks,
        batch=batch,
        length=length,
        whole=args.whole,
        say=progress.step,
    )
    stages = tuple(sorted(set(args.stage or (0, 1, 2, 3))))
    # Raises for options that have no meaning at any stage that was asked for.
    pipeline(dataclasses.replace(config, stage=stages[-1]))
    plan = _plan(planner, stages)
    formulas = _closed_forms(planner, plan) if args.formula else {}
    shown = length if target.has_length else None
    asked = Question(target.text, num_ranks, batch, shown, args.memory, precision, config, formulas)
    fits = args.memory is None or best_stage(plan, asked) is not None
    return Answer(as_data(plan, asked), as_text(plan, asked), ok=fits)


def _config(args: argparse.Namespace) -> ZeroConfig:
    """The options that flags name; they bear the same names."""
    codecs = tuple((args.quantize_gradients or "").split(","))
    gradients: Any = codecs if len(codecs) > 1 else args.quantize_gradients
    more: dict[str, Any] = (
        {} if args.quantize_exact is None else {"quantize_exact": tuple(args.quantize_exact)}
    )
    config = ZeroConfig(
        dump="",
        ranks_per_node=args.ranks_per_node,
        secondary_shards=args.secondary_shards,
        quantize=args.quantize,
        quantize_weights=args.quantize_weights,
        quantize_gradients=gradients,
        param_dtype=_DTYPES.get(args.param_dtype),
        **more,
    )
    return with_registered(config)


def _plan(planner: Planner, stages: Sequence[Stage]) -> Plan:
    try:
        return planner.plan(stages)
    except NotAlikeError as error:
        raise UnsupportedError(
            f"batches of other sizes have other programs ({error})",
            "ask for another --batch or --length",
        ) from error


def _closed_forms(planner: Planner, plan: Plan) -> dict[int, Any]:
    try:
        return planner.closed_forms(plan)
    except NotAlikeError as error:
        raise UnsupportedError(
            f"--formula: other lengths give other programs ({error})",
            "leave --formula out, and ask for each length",
        ) from error

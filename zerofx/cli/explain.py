"""`zerofx explain`: what became of a script, or of a model, on one screen."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
from pathlib import Path
from typing import cast

from zerofx.cli.command import Answer
from zerofx.cli.machine import check_inputs, machine_of, num_ranks_of
from zerofx.cli.progress import Progress
from zerofx.cli.targets import find_target
from zerofx.cli.units import counted
from zerofx.config import Stage, ZeroConfig
from zerofx.cost import machine as cost_machine
from zerofx.cost.machine import DATACENTER_GPU, Machine
from zerofx.debug.explain_text import as_data, as_text, why_data, why_text
from zerofx.debug.explanation import Explanation, explain_model, explanation_of
from zerofx.debug.outcome import Setting
from zerofx.debug.record import Recorder, captured_of
from zerofx.debug.script import Run, run_script
from zerofx.errors import ConfigError
from zerofx.frontend.constructors import construct
from zerofx.runtime.session import Session
from zerofx.runtime.speed import measure_roofline
from zerofx.torch_private import fake_mode

_RANKS = 8


def run(args: argparse.Namespace, progress: Progress) -> Answer:
    """Explain; a check fails if the programs do not fit into `--memory`."""
    is_script = args.script.endswith(".py")
    _refuse_misplaced(args, is_script)
    is_first = not int(os.environ.get("RANK", 0))
    with contextlib.redirect_stdout(sys.stderr):  # whatever the user's code prints
        done = _run(args, progress) if is_script else None
        if not is_first:
            return Answer(None, (), silent=True)
        found = _target(args, progress) if done is None else _script(args, done, progress)
    if args.why is not None:
        asked = found.why(args.why)
        return Answer(why_data(asked), (why_text(asked),))
    if args.until is not None:
        texts = found.until(args.until)
        return Answer(texts, tuple(text.rstrip("\n") + "\n" for text in texts.values()))
    room = args.memory
    fits = room is None or found.outcome.peak.total <= room
    return Answer(as_data(found), tuple(f"{part}\n" for part in as_text(found)), ok=fits)


def _asks_for_all(args: argparse.Namespace) -> bool:
    return args.why is None and args.until is None


def _refuse_misplaced(args: argparse.Namespace, is_script: bool) -> None:
    if args.why is not None and args.until is not None:
        raise ConfigError("--why and --until are two questions", "ask one at a time")
    if is_script:
        given = [name for name in ("stage", "batch", "length") if getattr(args, name) is not None]
        if given or args.input:
            name = given[0] if given else "input"
            raise ConfigError(
                f"--{name} is for a TARGET; a script chooses for itself",
                "put the script's own arguments behind its name",
            )
        if not Path(args.script).is_file():
            raise ConfigError(f"{args.script} does not exist", "name a Python file, or a TARGET")
    elif args.args:
        raise ConfigError(
            f"{args.args[0]!r} follows a TARGET, which takes no arguments",
            "put options before it",
        )


def _target(args: argparse.Namespace, progress: Progress) -> Explanation:
    target = find_target(args.script, args.input)
    batch, length = target.sizes(args.batch, args.length, (2, 128))
    check_inputs(batch, length)
    stage = cast(Stage, 3 if args.stage is None else args.stage)
    setting = Setting(
        ZeroConfig(stage=stage, dump=""), num_ranks_of(args, _RANKS), machine_of(args), args.memory
    )
    with fake_mode():
        model = construct(target.build)
        plain, named = target.inputs(batch, length)
    return explain_model(
        model,
        plain,
        named,
        setting,
        name=target.text,
        changes=_asks_for_all(args),
        say=progress.step,
    )


def _run(args: argparse.Namespace, progress: Progress) -> Run:
    path = Path(args.script)
    progress.step(f"running {path.name}")
    return run_script(path, args.args)


def _script(args: argparse.Namespace, done: Run, progress: Progress) -> Explanation:
    session = done.recorder.session
    assert session is not None
    ranks = done.measured.num_ranks
    machine = machine_of(args, _machine_here(session))
    setting = Setting(
        session.config, num_ranks_of(args, ranks if ranks > 1 else _RANKS), machine, args.memory
    )
    return explanation_of(
        Path(args.script).name,
        setting,
        captured_of(
            done.recorder.graphs, done.breaks, done.seen, left_out=_left_out(done.recorder)
        ),
        done.recorder.training,
        measured=done.measured,
        changes=_asks_for_all(args),
        say=progress.step,
    )


def _left_out(recorder: Recorder) -> str:
    others = recorder.others
    if not others:
        return ""
    stages = {each.session.config.stage for each in others if each.session is not None}
    names = ", ".join(f"zero{stage}" for stage in sorted(stages))
    return (
        f"{counted(len(others), 'graph')} of models that have other options than the "
        f"first one ({names}): explain a script that trains these alone"
    )


def _machine_here(session: Session) -> Machine:
    """This device, measured; the link as `zerofx bench comm` measured it, or as can be computed."""
    machine = cost_machine.machine_of(session.device.type, session.network.table)
    if session.network.table is None:
        machine = machine.with_link(DATACENTER_GPU.link)
    return dataclasses.replace(machine, roofline=measure_roofline(session.device))

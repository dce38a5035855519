"""A launch, step by step: the wish and the call become a plan, the plan a run."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate_nb.config.environment import runs_folder
from accelerate_nb.config.launching import Launching
from accelerate_nb.config.run import RunConfig
from accelerate_nb.devices import xla
from accelerate_nb.devices.cpu import cores
from accelerate_nb.devices.probe import probe
from accelerate_nb.errors import NeedsForkError
from accelerate_nb.events.model import Event
from accelerate_nb.events.record import Record, new_folder, prune
from accelerate_nb.events.view import RunView
from accelerate_nb.launching.attempt import Attempt, Scene
from accelerate_nb.launching.choosing import Choice, choose
from accelerate_nb.launching.ending import Ending
from accelerate_nb.launching.engines import supervised
from accelerate_nb.launching.engines.base import Placing
from accelerate_nb.launching.engines.forked import FromThisProcess
from accelerate_nb.launching.engines.inline import Here
from accelerate_nb.launching.engines.spawned import FreshPython
from accelerate_nb.launching.order import Surroundings, surroundings_here
from accelerate_nb.launching.payload import Call, Payload, inherit, pack
from accelerate_nb.launching.plan import Plan
from accelerate_nb.launching.run import FrontEnd, Run, RunHere
from accelerate_nb.launching.sampling import Sampler
from accelerate_nb.launching.seat import on_loopback
from accelerate_nb.launching.sources import sources_here


def prepare(
    function: Callable[..., Any],
    args: Sequence[Any],
    config: RunConfig,
    front_end: FrontEnd,
    heard: Callable[[Event], None] = lambda _: None,
) -> Run:
    """
    A run of `function(*args)` on as many workers as the wish says, ready to be started.

    `heard` is called with every event but the lines of output, in the run's thread, once the view knows of it.

    Raises `LaunchError` or `PayloadError` before anything has started.
    """
    __tracebackhide__ = True  # IPython shows the person's own frames alone
    wish = config.launching
    choice = choose(wish, probe(), can_fork=hasattr(os, "fork"), mesh=config.training.xla_mesh)
    call = Call(function, tuple(args))
    if choice.start == "inline":
        return _run(
            RunHere, config, choice, call.name, front_end, heard, _inline(call, {**config.environ(), **choice.shows})
        )
    payload, choice = _payload(call, choice, asked=wish.start_method != "auto")
    if choice.kind == "xla":
        supervised.hint(xla.MODULES)
    placing = _placing(choice, payload)
    plan = Plan(
        payload=payload,
        size=choice.size,
        surroundings=_surroundings(config, choice),
        run=uuid.uuid4().hex[:12],
        port=wish.use_port or 0,
        max_restarts=wish.max_restarts,
        per_process=choice.per_process,
        through_xla=choice.kind == "xla",
    )
    return _run(
        Run,
        config,
        choice,
        call.name,
        front_end,
        heard,
        lambda scene, number: Attempt(plan, placing, scene, number),
        payload,
    )


def _surroundings(config: RunConfig, choice: Choice) -> Surroundings:
    """What of this process's state workers take over."""
    here = surroundings_here(environment(config, choice), _threads(config.launching, choice))
    said = xla.for_workers(here.environ) if choice.kind == "xla" else xla.for_others(here.environ)
    return replace(here, environ=said)


def _payload(call: Call, choice: Choice, *, asked: bool) -> tuple[Payload, Choice]:
    """What the workers run; where it can only be inherited and nothing else was asked for, they are forked from here."""
    __tracebackhide__ = True  # IPython shows the person's own frames alone
    # what is inherited would be one for all ranks of a process
    if choice.start == "fork" and choice.per_process == 1:
        return inherit(call), choice
    try:
        return pack(call), choice
    except NeedsForkError:
        # torch_xla's runtime that is awake here would be dead in a process forked from here
        if asked or choice.per_process > 1 or (choice.kind == "xla" and xla.is_awake()):
            raise
    why = "forked from here: among the arguments is something of multiprocessing's 'fork' context"
    return inherit(call), replace(choice, start="fork", why=why)


def _placing(choice: Choice, payload: Payload) -> Placing:
    if choice.start == "fork":
        return FromThisProcess(payload)
    return FreshPython() if choice.start == "spawn" else supervised.FromSupervisor()


def _inline(call: Call, environ: dict[str, str]) -> Callable[[Scene, int], Here]:
    return lambda scene, _: Here(call, environ, scene)


def _run(
    kind: type[Run],
    config: RunConfig,
    choice: Choice,
    name: str,
    front_end: FrontEnd,
    heard: Callable[[Event], None],
    attempt: Callable[[Scene, int], Any],
    payload: Payload | None = None,
) -> Run:
    wish = config.launching
    parent = (Path(wish.folder) if wish.folder else runs_folder(os.environ)).expanduser().absolute()
    scene = Scene(
        sources=sources_here(),
        view=RunView(choice.size),
        record=Record(new_folder(parent, name)),
        deadline=None if wish.timeout is None else time.monotonic() + wish.timeout,
        grace=wish.grace,
        quiet=wish.quiet,
        heard=heard,
    )

    def at_end(endings: tuple[Ending, ...]) -> None:
        if payload is not None:
            payload.close()
        prune(parent)
        supervised.hint(module for ending in endings for module in ending.modules)

    return kind(
        scene=scene,
        attempt=lambda number: attempt(scene, number),
        max_restarts=wish.max_restarts,
        timeout=wish.timeout,
        results=wish.results,
        front_end=front_end,
        name=name,
        why=choice.why,
        at_end=at_end,
        sampler=Sampler(
            scene.view,
            choice.size,
            choice.kind,
            {**os.environ, **choice.shows},
            [scene.record.folder, Path.cwd()],
        ),
    )


def environment(config: RunConfig, choice: Choice) -> dict[str, str]:
    """What workers find in their environment beyond what is here; what the person set of the rest stays."""
    threads = str(_threads(config.launching, choice))
    defaults = {**on_loopback(), "OMP_NUM_THREADS": threads}
    said = {name: value for name, value in defaults.items() if name not in os.environ}
    own = {} if config.launching.num_cpu_threads_per_process is None else {"OMP_NUM_THREADS": threads}
    # Accelerate's own Accelerator connects ranks on the CPU only where this says so
    on_cpu = {"ACCELERATE_USE_CPU": "true"} if choice.cpu else {}
    return {**said, **own, **config.environ(), **choice.shows, **on_cpu}


def _threads(wish: Launching, choice: Choice) -> int:
    """How many threads each worker computes with: what the person said, else its share of the cores."""
    if wish.num_cpu_threads_per_process is not None:
        return wish.num_cpu_threads_per_process
    said = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(said) if said.isdecimal() and int(said) else max(1, cores() // choice.size)

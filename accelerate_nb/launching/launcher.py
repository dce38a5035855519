"""A launch, step by step: the configuration and the call become a plan, the plan a conductor."""

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from accelerate_nb.config.environment import USE_CPU, attempt_variables, runs_folder
from accelerate_nb.config.launch import LaunchingConfig
from accelerate_nb.config.run_config import RunConfig, origin, setting_named
from accelerate_nb.devices import nvml
from accelerate_nb.devices.cpu import cores
from accelerate_nb.devices.probe import probe
from accelerate_nb.errors import ConfigurationError, LaunchError, NeedsForkError
from accelerate_nb.events.event_types import Event
from accelerate_nb.events.run_folder import RunRecorder, new_folder
from accelerate_nb.events.run_state import RunState
from accelerate_nb.failures.process_limits import check_limits
from accelerate_nb.launching.conductor import Conductor, Launch, Nodes
from accelerate_nb.launching.engines import supervisor
from accelerate_nb.launching.engines.children import Engine, fork_workers, spawn_workers
from accelerate_nb.launching.engines.inline import InlineWorkers, LaunchedProcessWorkers
from accelerate_nb.launching.group_runner import GroupRunner, Outcomes, RunContext
from accelerate_nb.launching.nodes.ray import RayConnection, connection_of_run_host
from accelerate_nb.launching.nodes.rendezvous import join_nodes, local_placement
from accelerate_nb.launching.nodes.run_nodes import find_nodes, node_environment, nodes_to_find
from accelerate_nb.launching.planning.placement import LaunchPlan, Placement, choose_placement, devices_of, taken
from accelerate_nb.sources.cells import current_sources
from accelerate_nb.sources.run_source import keep_source
from accelerate_nb.transport.payload import FunctionCall, inherit, pack
from accelerate_nb.transport.worker_spec import current_environment, on_interface
from accelerate_nb.user_warnings import warn_user


def warm_early() -> None:
    """Start the supervisor before there is a launch, with the idle timeout that the environment sets."""
    try:
        # this setting alone: the launch reports what is wrong with the others, or deprecated
        idle_timeout = origin(setting_named("supervisor_idle_timeout"), {}, os.environ).value
    except ConfigurationError:
        idle_timeout = None
    supervisor.warm(idle_timeout)


@dataclass(frozen=True, slots=True)
class RunRequest(Launch):
    """A launch as values, which any process of its user can conduct: the call's payload, the workers' plan."""

    # With a `cluster`, or where each node launches its part, the process that conducts the run finds the nodes; until
    # then placement and plan are those of this node, or have no sizes.

    plan: LaunchPlan
    nodes: Nodes
    cluster: RayConnection | None = None


def prepare(
    function: Callable[..., Any],
    args: Sequence[Any],
    config: RunConfig,
    on_event: Callable[[Event], None] = lambda _: None,
    *,
    is_run_kept: bool = True,
) -> Conductor:
    """The conductor of a run of `function(*args)`, not started yet; raises `LaunchError` or `PayloadError`."""
    # nobody reads results of a run that is not kept, but those that the configuration requests: ranks don't send them
    __tracebackhide__ = True  # IPython shows the person's own frames alone
    call = FunctionCall(function, tuple(args))
    config.launching.check_min_nodes()
    if config.launching.is_on_each_node:
        config, choice, joined = join_nodes(config)
        try:
            return conductor_of(_request(call, config, choice, joined, is_run_kept=is_run_kept), on_event)
        except BaseException as error:
            # the others learn that there is no run
            joined.leave(str(error) or "it was interrupted")
            raise
    choice, nodes = choose_where(config)
    if choice.start != "inline":
        return conductor_of(_request(call, config, choice, nodes, is_run_kept=is_run_kept), on_event)

    def worker_group(run_context: RunContext, number: int) -> InlineWorkers:
        variables = attempt_variables(run_context.record.folder, number)
        return InlineWorkers(call, {**config.environ(), **choice.shows, **variables}, run_context)

    return Conductor(_launch(call, config, choice), worker_group, Nodes(), on_event=on_event)


def prepare_in_launched_process(call: FunctionCall, config: RunConfig, environ: Mapping[str, str]) -> Conductor:
    """The conductor of the call in the processes that a launcher started, ready to be started; each of them has to start it."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    config = replace(config, launching=replace(config.launching, max_restarts=0, timeout=None))
    kind = "cpu" if config.launching.cpu else probe().kind
    why = f"in the {size} processes that a launcher started"
    choice = Placement("inline", size, cpu=kind == "cpu", why=why, kind=kind)
    launch = _launch(call, config, choice)
    return Conductor(launch, lambda context, _: LaunchedProcessWorkers(call, environ, context, rank, size), Nodes())


def request(
    function: Callable[..., Any], args: Sequence[Any], config: RunConfig, folder: Path | None = None
) -> RunRequest:
    """The values from which another process conducts a run; raises `LaunchError` also where it would fork."""
    __tracebackhide__ = True  # IPython shows the person's own frames alone
    config.launching.check_min_nodes()
    call = FunctionCall(function, tuple(args))
    if config.launching.engine == "ray":
        cluster = connection_of_run_host(config.launching)
        return replace(_request(call, config, *nodes_to_find(config), folder, can_inherit=False), cluster=cluster)
    choice, nodes = choose_where(config)
    if choice.start in {"inline", "fork"}:
        how = "engine='inline'" if choice.start == "inline" else "start_method='fork'"
        raise LaunchError(
            f"detach=True was requested with {how}, which runs the function in this process or in a copy of it: it would "
            "end with the notebook. Leave that setting out."
        )
    return _request(call, config, choice, nodes, folder, can_inherit=False)


def meet_nodes(request: RunRequest) -> RunRequest:
    """The request of a node that launches its part of a run, once the others have come; raises `LaunchError`."""
    config, placement, nodes = join_nodes(request.config)
    plan = request.plan.with_variables(nodes.variables())
    plan = replace(
        plan,
        size=placement.size,
        run=nodes.run,
        max_restarts=config.launching.max_restarts,
        node_sizes=nodes.roster.sizes,
    )
    return replace(request, config=config, placement=placement, plan=plan, nodes=nodes)


def conductor_of(
    request: RunRequest,
    on_event: Callable[[Event], None] = lambda _: None,
    outcomes: Callable[[RunState, RunRecorder], Outcomes] = lambda _view, _record: Outcomes(),
) -> Conductor:
    """The conductor of a request in this process, ready to be started; `on_event` and `outcomes` are the conductor's."""
    choice, plan = request.placement, request.plan
    supervisor.preload(choice.preloaded)
    engine: Engine
    if choice.start == "fork":
        engine = partial(fork_workers, plan.payload)
    elif choice.start == "spawn":
        engine = spawn_workers
    else:
        idle_timeout = request.config.launching.supervisor_idle_timeout
        engine = partial(supervisor.supervised_workers, idle_timeout=idle_timeout)

    def worker_group(run_context: RunContext, number: int) -> GroupRunner:
        attempt = plan.with_variables(attempt_variables(request.folder, number))
        return request.nodes.worker_group(attempt, engine, run_context, number)

    return Conductor(request, worker_group, request.nodes, plan.payload, on_event, outcomes)


def choose_where(config: RunConfig) -> tuple[Placement, Nodes]:
    """The placement of a run on this machine, or of all on its nodes, which are there then; raises `LaunchError`."""
    if config.launching.names_hosts or (config.launching.num_nodes > 1 and not config.launching.is_on_each_node):
        return find_nodes(config)
    is_part = config.launching.is_on_each_node
    placement = local_placement(config, probe()) if is_part else choose_placement(config, probe(), hasattr(os, "fork"))
    if placement.start != "inline":
        check_limits(placement.size)
    return placement, Nodes()


def _request(
    call: FunctionCall,
    config: RunConfig,
    choice: Placement,
    nodes: Nodes,
    folder: Path | None = None,
    *,
    can_inherit: bool = True,
    is_run_kept: bool = True,
) -> RunRequest:
    __tracebackhide__ = True  # IPython shows the person's own frames alone
    launching_config = config.launching
    try:
        payload = inherit(call) if choice.start == "fork" else pack(call)
    except NeedsForkError:
        is_method_requested = launching_config.start_method != "auto" or not can_inherit or bool(nodes.roster.names)
        if is_method_requested or not choice.outlives_fork:
            raise
        why = "forked from here: among the arguments is something of multiprocessing's 'fork' context"
        payload, choice = inherit(call), replace(choice, start="fork", why=why)
    if nodes.inherits_environment:
        process_environment = node_environment(config, choice)
    else:
        # threads are shared by the ranks of this machine
        here = nodes.placement_here(choice)
        threads = worker_threads(launching_config, here)
        variables = {**environment(config, here, threads), **nodes.variables()}
        process_environment = current_environment(variables, threads)
        process_environment = replace(process_environment, environ=here.fitting(process_environment.environ))
    plan = LaunchPlan(
        payload=payload,
        size=choice.size,
        process_environment=process_environment,
        run=nodes.run or uuid.uuid4().hex,
        port=launching_config.use_port or 0,
        max_restarts=launching_config.max_restarts,
        kind=choice.kind,
        node_sizes=nodes.roster.sizes,
        wants_all_results=is_run_kept or launching_config.results == "all",
    )
    try:
        nodes.check_payload(payload)
        parent = runs_folder(os.environ, launching_config.folder)
        for text in taken(() if nodes.roster.names else devices_of(choice, os.environ), parent):
            warn_user(text)
        launch = _launch(call, config, choice, folder)
    except BaseException:
        payload.close()
        raise
    return RunRequest(**{item.name: getattr(launch, item.name) for item in fields(launch)}, plan=plan, nodes=nodes)


def _launch(call: FunctionCall, config: RunConfig, choice: Placement, folder: Path | None = None) -> Launch:
    """The launch of a call; its folder is made, where none is given, and its source written there."""
    name = config.launching.name or call.name
    folder = folder or new_folder(runs_folder(os.environ, config.launching.folder), name)
    facts = {"function": call.name, "arguments": keep_source(folder, call.function, call.args, current_sources())}
    return Launch(name, config, choice, current_sources(), folder, facts)


def environment(config: RunConfig, choice: Placement, threads: int) -> dict[str, str]:
    """The variables that workers get beside those of this process; variables that the user has set stay."""
    # the interface between several nodes is known once they have found each other
    interface = {} if config.launching.is_on_each_node else on_interface()
    threads_variable = {"OMP_NUM_THREADS": str(threads)}
    peers = _without_peers() if choice.kind == "cuda" and choice.size > 1 else {}
    usual = {**interface, **threads_variable, **peers}
    missing = {name: value for name, value in usual.items() if name not in os.environ}
    requested = {} if config.launching.num_cpu_threads_per_process is None else threads_variable
    # Accelerate's own Accelerator connects ranks on the CPU only where this is set
    on_cpu = {USE_CPU: "true"} if choice.cpu else {}
    return {**missing, **requested, **config.environ(), **choice.shows, **on_cpu}


def _without_peers() -> dict[str, str]:
    """The variables that have NCCL send from GPU to GPU through the host's memory, where it would hang otherwise."""
    found = nvml.driver()
    if found is None or nvml.may_send_directly([name for name, _ in found.gpus], found.version):
        return {}
    return dict.fromkeys(("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE"), "1")


def worker_threads(launching_config: LaunchingConfig, choice: Placement) -> int:
    """The number of threads each worker computes with: the setting, else the variable, else its share of the cores."""
    if launching_config.num_cpu_threads_per_process is not None:
        return launching_config.num_cpu_threads_per_process
    variable = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(variable) if variable.isdecimal() and int(variable) else max(1, cores() // choice.size)

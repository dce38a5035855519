"""The functions that run another function on every process."""

import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

from accelerate_nb.config import hf_files
from accelerate_nb.config.environment import USE_CPU, already_launched, warms_early
from accelerate_nb.config.run_config import RunConfig, all_settings, differing, resolve
from accelerate_nb.config.settings import given_arguments, settings as settings_of, unset
from accelerate_nb.config.training import TrainingConfig
from accelerate_nb.errors import AccelerateNbError, ConfigurationError
from accelerate_nb.events.run_folder import shown_path
from accelerate_nb.launching import launcher as launching
from accelerate_nb.launching.detached.run_host import launch_detached
from accelerate_nb.launching.run import FrontEnd, Run
from accelerate_nb.notebook.cells.completion import register_values
from accelerate_nb.notebook.display import select
from accelerate_nb.notebook.display.busy_kernel_comm import notice_every_request
from accelerate_nb.notebook.host import host
from accelerate_nb.script.ranks import everywhere
from accelerate_nb.sources.cells import ipython_shell, name_in_warnings
from accelerate_nb.transport.payload import FunctionCall, check_function
from accelerate_nb.user_warnings import warn_user
from accelerate_nb.worker.launched_call import launched_call

Launcher = TypeVar("Launcher", bound=Callable[..., Any])


def _with_all_settings(launcher: Launcher) -> Launcher:
    """A launcher whose signature has every setting by its name, which TAB and `?` show."""
    signature = inspect.signature(launcher)
    *parameters, others = signature.parameters.values()
    more = [
        inspect.Parameter(setting.name, inspect.Parameter.KEYWORD_ONLY, default=setting.default)
        for setting in all_settings()
        if setting.name not in signature.parameters
    ]
    launcher.__signature__ = signature.replace(parameters=[*parameters, *more, others])  # type: ignore[attr-defined]
    return launcher


@_with_all_settings
def notebook_launcher(
    function: Callable[..., Any],
    args: Iterable[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = unset("no"),
    use_port: str | int = unset("29500"),
    master_addr: str = unset("127.0.0.1"),
    node_rank: int = unset(0),
    num_nodes: int | str = unset(1),
    rdzv_backend: str = unset("static"),
    rdzv_endpoint: str = unset(""),
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = unset("none"),
    max_restarts: int = unset(0),
    monitor_interval: float = unset(0.1),
    log_line_prefix_template: str | None = None,
    *,
    cpu: bool | None = None,
    start_method: str = unset("auto"),
    timeout: float | None = None,
    results: str = unset("main"),
    panel: bool | str = unset("auto"),
    detach: bool | None = None,
    config: RunConfig | None = None,
    config_file: str | Path | None = None,
    **settings: Any,
) -> Any:
    """
    Run `function(*args)` on every process, wait for all of them, and return rank 0's result.

    The function may be written in the cell above: whatever it uses is sent with it. The output of the processes appears under
    their ranks, and all of it is kept in the run's folder.

    Every process begins with this process's random state, and so draws the same numbers, at each launch again;
    `set_seed(seed, device_specific=True)` in the function makes them differ. A result comes with tensors on the CPU and prepared models
    as they were before `prepare`. One with a part that can't be pickled is `None`, with a warning that names the part.

    What is not given here is taken from the environment (`ACCELERATE_*`, `ACCELERATE_NB_*`), then from Accelerate's
    `default_config.yaml`, then has the default that the signature shows.

    In processes that a launcher started already (`torchrun`, `accelerate-nb launch`, or this one) each calls the function
    itself, so a script and a notebook can share the call; all of them have to make it. They get the notebook's result, over the
    process group as by `broadcast_object_list`: rank 0's value, or the list of all, pickled, with tensors on the CPU. What the
    function joined ends with the call. A process whose function fails raises its own exception, and the others what their
    collectives raise. Their number, devices and time limits are those of the launcher that started them.

    - `num_processes`: the number of processes on this machine; without it one for each accelerator. With `hosts` or `engine`, the number
      on all machines.
    - `mixed_precision`: "no", "fp16" or "bf16", for an `Accelerator()` without an argument of its own.
    - `use_port`: the port of the rendezvous; without it, any free one of the loopback address, and 29500 of several machines.
    - `max_restarts`: the number of times that all processes are restarted after one failed; `Accelerator.resume()` in the function
      goes on from the newest checkpoint.
    - `log_line_prefix_template`: the prefix of a line, with `${rank}`, `${local_rank}`, `${role_name}`.
    - `cpu`: compute on the CPU, also where there are accelerators.
    - `start_method`: "supervisor" (forked by a process that has touched no device), "fork", "spawn", or "auto".
    - `timeout`: seconds for the whole run; then every rank's stack is shown.
    - `results`: "main" for rank 0's return value, "all" for a list of every rank's.
    - `panel`: the display of the run: "widget" for a live panel, "html" for one that needs no kernel, "text" for lines, `False`
      or "off" for results and errors only, or "auto" for what the notebook or terminal can show.
    - `detach`: let the run outlive this process: when the kernel is restarted or killed, it goes on, and `attach()` finds it
      again, from any notebook or terminal. An interrupt ends the wait and leaves the run alone.
    - `config`: a whole configuration, such as a picker's `value`, in place of the environment and the file; arguments of
      the call win.
    - `config_file`: another configuration file; `""` for none.
    - `settings`: any other setting, such as `gradient_accumulation_steps`, `engine`, `folder` or `stop_grace_period` (seconds in which
      processes may exit by themselves after an interrupt).

    `hosts=["a", "b:4"]` runs it on other machines, which ssh reaches; with `max_restarts` and `num_nodes="1:2"` it goes on with fewer of
    them after one was lost; `num_nodes` with `engine="local"` has agents on this machine pretend to
    be as many, and with `engine="join"` waits for as many machines that join by the line that it shows; with `engine="ray"` they are nodes of a Ray
    cluster. Otherwise `num_nodes` machines
    each launch it, with their `node_rank` and the address of node 0 as `master_addr` (or one `rdzv_endpoint`), and wait for each other; node 0 decides about restarts and time limits, and each gets the results of its own ranks.

    Raises `WorkerError`, which is also an instance of the worker's own exception, if a process failed; `HangError` if the
    time was over; `ConfigurationError`, `NotYetError`, `PayloadError` or `LaunchError` before any process starts.

    >>> def train(epochs):
    ...     accelerator = Accelerator()
    ...     return accelerator.num_processes
    >>> notebook_launcher(train, args=(3,), num_processes=2, mixed_precision="bf16")
    2
    """
    __tracebackhide__ = True  # IPython shows the user's own frames alone
    arguments = {
        "num_processes": num_processes,
        "mixed_precision": mixed_precision,
        "use_port": use_port,
        "master_addr": master_addr,
        "node_rank": node_rank,
        "num_nodes": num_nodes,
        "rdzv_backend": rdzv_backend,
        "rdzv_endpoint": rdzv_endpoint,
        "rdzv_conf": rdzv_conf,
        "rdzv_id": rdzv_id,
        "max_restarts": max_restarts,
        "monitor_interval": monitor_interval,
        "log_line_prefix_template": log_line_prefix_template,
        "cpu": cpu,
        "start_method": start_method,
        "timeout": timeout,
        "results": results,
        "detach": detach,
        **_shown(panel),
        **settings,
    }
    if already_launched(os.environ):
        return everywhere(_called, function, _as_arguments(args), _resolved_in_process(arguments, config_file, config))
    return _waited_for(_prepared(function, args, resolved(arguments, config_file, config)))


def debug_launcher(function: Callable[..., Any], args: Iterable[Any] = (), num_processes: int = 2) -> Any:
    """
    Run `function(*args)` on a few CPU processes, to find mistakes without a GPU; return what rank 0's call returned.

    It raises what `notebook_launcher` raises, and like it calls the function in processes that a launcher started already. No
    configuration file is read, and of the environment only `ACCELERATE_NB_PANEL`.

    >>> debug_launcher(train, args=(3,))
    """
    __tracebackhide__ = True  # IPython shows the user's own frames alone
    panel = select.display_settings().panel
    config = resolve({"num_processes": num_processes, "cpu": True, "mixed_precision": "no", "panel": panel}, {})
    if already_launched(os.environ):
        return everywhere(_called, function, _as_arguments(args), config)
    return _waited_for(_prepared(function, args, config))


@_with_all_settings
def launch(
    function: Callable[..., Any],
    args: Iterable[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    panel: bool | str | None = None,
    config: RunConfig | None = None,
    config_file: str | Path | None = None,
    **settings: Any,
) -> Run:
    """
    Run `function(*args, **kwargs)` on every process, and return at once with the `Run`, which is waited for or stopped.

    In a notebook the run's panel appears under the cell and stays live while other cells run; lines of text are written
    where the run is waited for, or with `panel=True` under this cell, too. `panel=False` shows nothing but a line on a
    failure that no caller waits for; a text is the setting of that name, and `config` and `settings` are those of
    `notebook_launcher`. With `detach=True` the run outlives this process, and `attach()` gives it back.

    In processes that a launcher started already, each calls the function itself, as with `notebook_launcher`, and the run is
    over when it is given back: with every rank's result and metrics, and the logs of those on this machine.

    Raises `ConfigurationError`, `NotYetError`, `PayloadError` or `LaunchError` before any process starts.

    >>> run = launch(train, args=(3,), num_processes=2, results="all")
    >>> run.wait()
    [2, 2]
    """
    __tracebackhide__ = True  # IPython shows the user's own frames alone
    call = partial(function, **kwargs) if kwargs else function
    if already_launched(os.environ):
        in_process = _resolved_in_process({**_shown(panel), **settings}, config_file, config)
        return everywhere(_run_in_process, call, _as_arguments(args), in_process)
    config = resolved({**_shown(panel), **settings}, config_file, config)
    front_end = select.front_end(config.launching, os.environ)
    run = _prepared(call, args, config, front_end).start()
    if panel is True or select.shows_at_once(front_end):
        run.follow()
    return run


def _shown(panel: bool | str | None) -> dict[str, Any]:
    """`panel` as the setting of that name."""
    if isinstance(panel, bool):
        return {} if panel else {"panel": "off"}
    return {"panel": panel}


def resolved(
    arguments: Mapping[str, Any],
    config_file: str | Path | None,
    whole: RunConfig | None = None,
    only: Collection[str] | None = None,
) -> RunConfig:
    """The configuration from arguments, and from a `whole` one or else the environment and a file, from it `only` some settings."""
    __tracebackhide__ = True  # IPython shows the user's own frames alone
    try:
        if whole is None:
            path = hf_files.find(os.environ, config_file)
            content = hf_files.read(path) if path is not None else None
            if content is not None and only is not None:
                keys = {key for setting in all_settings() if setting.name in only for key in setting.keys}
                content = {key: value for key, value in content.items() if key in keys}
            config = resolve(arguments, os.environ, content)
        else:
            if not isinstance(whole, RunConfig):
                raise ConfigurationError(
                    f"config should be a RunConfig, but is {type(whole).__name__} {whole!r:.100}. "
                    "Pass a picker's value, config=picker.value; a file is named by config_file=."
                )
            if config_file is not None:
                raise ConfigurationError(
                    f"Both config and config_file={str(config_file)!r} were given, and each is a whole configuration. Pass one of them."
                )
            config = resolve({**differing(whole), **given_arguments(arguments)}, {})
    except AccelerateNbError as error:
        # it explains itself: the calls of this package that led to it are of no use to a reader
        raise error.with_traceback(None) from None
    given = given_arguments(arguments).get("num_processes")
    if given is None or not config.launching.is_on_each_node:
        return config
    # `num_processes` of a launch on each node is that node's, as Accelerate has it
    launching_config = replace(config.launching, num_processes=int(given) * config.launching.num_nodes)
    return replace(config, launching=launching_config)


def _resolved_in_process(
    arguments: Mapping[str, Any], config_file: str | Path | None, whole: RunConfig | None
) -> RunConfig:
    """The configuration in a launched process; its launcher decided the number of processes and their devices."""
    __tracebackhide__ = True  # IPython shows the user's own frames alone
    known = {setting.name for setting in all_settings()}
    names = {*(item.name for item in settings_of(TrainingConfig)), "cpu", "folder", "results", "name", "tags"}
    left = {name: value for name, value in arguments.items() if name in names or name not in known}
    config = resolved(left, config_file, whole, names)
    requested = given_arguments(arguments).get("num_processes") or (
        None if whole is None else whole.launching.num_processes
    )
    if requested is not None and os.environ["RANK"] == "0":
        _warn_of_size(int(requested), int(os.environ["WORLD_SIZE"]))
    return config


@cache
def _warn_of_size(requested: int, size: int) -> None:
    """Warn once that the number of processes is not the requested one."""
    if requested != size:
        warn_user(
            f"num_processes={requested} was requested in a process that a launcher started already, as one of {size}: the "
            f"function runs on these {size}."
        )


def _called(function: Callable[..., Any], args: Iterable[Any], config: RunConfig) -> Any:
    """The return value of a launcher in processes that exist already."""
    __tracebackhide__ = True  # IPython shows the user's own frames alone
    check_function(function)
    call, results = FunctionCall(function, _as_arguments(args)), config.launching.results
    values, _ = launched_call(call, _environ_in_process(config), results)
    return values if results == "all" else values[0]


def _run_in_process(function: Callable[..., Any], args: Iterable[Any], config: RunConfig) -> Run:
    """The run that a launch gives in processes that are there already."""
    __tracebackhide__ = True  # IPython shows the user's own frames alone
    check_function(function)
    call, environ = FunctionCall(function, _as_arguments(args)), _environ_in_process(config)
    run = Run(launching.prepare_in_launched_process(call, config, environ), select.FailureOnly()).start()
    if run.error is not None:
        sys.stderr.write(
            f"{run.name} has failed; wait() of its run raises why. Its output is in {shown_path(run.folder)}\n"
        )
    return run


def _environ_in_process(config: RunConfig) -> dict[str, str]:
    """The variables for an `Accelerator` in a launched process."""
    return {**config.training.environ(), USE_CPU: str(config.launching.cpu).lower()}


def _waited_for(run: Run) -> Any:
    """The result of a run; an interrupt at any moment leaves no workers behind."""
    __tracebackhide__ = True  # IPython shows the user's own frames alone
    try:
        return run.start().wait()
    except KeyboardInterrupt:
        if not run.is_detached:
            # one that came before the wait, which ends the workers at its own
            run.stop(timeout=0)
        raise


def _prepared(
    function: Callable[..., Any], args: Iterable[Any], config: RunConfig, front_end: FrontEnd | None = None
) -> Run:
    __tracebackhide__ = True  # IPython shows the user's own frames alone
    shown = front_end or select.front_end(config.launching, os.environ)
    check_function(function)
    arguments = _as_arguments(args)
    try:
        if config.launching.detach:
            return Run(launch_detached(function, arguments, config), shown)
        return Run(launching.prepare(function, arguments, config, is_run_kept=front_end is not None), shown)
    except AccelerateNbError as error:
        # as in `resolved`
        raise error.with_traceback(None) from None


def _as_arguments(args: Iterable[Any]) -> tuple[Any, ...]:
    """The function's arguments as a tuple; a bare one, as in `args=(3)`, is an error."""
    __tracebackhide__ = True  # IPython shows the user's own frames alone
    if isinstance(args, (str, bytes)) or not isinstance(args, Iterable):
        raise ConfigurationError(
            f"args should hold the function's arguments, but is {args!r}. Pass a tuple; one argument needs a comma: args=(x,)."
        )
    return tuple(args)


def _warm_in_a_notebook() -> None:
    """Where a notebook names a launcher, start the supervisor, complete the settings of launchers, and name cells in warnings."""
    notice_every_request()
    if host(os.environ).kind != "script" and not already_launched(os.environ):
        name_in_warnings()
        register_values(ipython_shell())
    if host(os.environ).kind == "jupyter" and warms_early(os.environ) and not already_launched(os.environ):
        launching.warm_early()


_warm_in_a_notebook()

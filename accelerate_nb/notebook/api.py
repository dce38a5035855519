"""The functions that a person calls to run another on every process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from accelerate_nb.config import files
from accelerate_nb.config.environment import already_launched, warms_early
from accelerate_nb.config.fields import said, settings as settings_of, unsaid
from accelerate_nb.config.run import RunConfig, all_settings, differing, resolve
from accelerate_nb.config.training import Training
from accelerate_nb.errors import ConfigurationError
from accelerate_nb.launching import functions as launching, launched
from accelerate_nb.launching.engines.present import prepare_present
from accelerate_nb.launching.engines.supervised import warm
from accelerate_nb.launching.gathering import tell_of_size
from accelerate_nb.launching.payload import Call
from accelerate_nb.launching.run import FrontEnd, Run
from accelerate_nb.notebook import choosing
from accelerate_nb.notebook.host import host


def notebook_launcher(
    function: Callable[..., Any],
    args: Iterable[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = unsaid("no"),
    use_port: str | int = unsaid("29500"),
    master_addr: str = unsaid("127.0.0.1"),
    node_rank: int = unsaid(0),
    num_nodes: int = unsaid(1),
    rdzv_backend: str = unsaid("static"),
    rdzv_endpoint: str = unsaid(""),
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = unsaid("none"),
    max_restarts: int = unsaid(0),
    monitor_interval: float = unsaid(0.1),
    log_line_prefix_template: str | None = None,
    *,
    cpu: bool | None = None,
    start_method: str = unsaid("auto"),
    timeout: float | None = None,
    results: str = unsaid("main"),
    panel: bool | str = unsaid("auto"),
    config: RunConfig | None = None,
    config_file: str | Path | None = None,
    **settings: Any,
) -> Any:
    """
    Run `function(*args)` on every process, wait for all of them, and return what rank 0's call returned.

    The function may be written in the cell above: whatever it uses travels with it. What the processes print appears under
    their ranks, and all of it is kept in the run's folder.

    What is not said here is taken from the environment (`ACCELERATE_*`, `ACCELERATE_NB_*`), then from Accelerate's
    `default_config.yaml`, then has the default that the signature shows.

    In processes that a launcher started already (`torchrun`, `accelerate-nb launch`, or this one) each calls the function
    itself, so a script and a notebook can share the call; all of them have to make it. The function finds a process that has
    joined nothing, whatever was joined before, and what was goes on afterwards. All processes get what the notebook would:
    rank 0's value, or the list of all, pickled, with tensors on the CPU. A value that can't be pickled stays in its own
    process, and others have their own, or `None` in the list, in its place. A process whose function fails raises what it
    raised, and the others a `WorkerError`. How many processes there are, where, and for how long, whoever started them decided.

    - `num_processes`: how many; without it one for each accelerator of this machine.
    - `mixed_precision`: "no", "fp16" or "bf16", for an `Accelerator()` that is not told otherwise.
    - `use_port`: the port at which processes meet; where none was said, any free one of the loopback address.
    - `max_restarts`: how often all processes are started again after one failed.
    - `log_line_prefix_template`: what stands before a line, with `${rank}`, `${local_rank}`, `${role_name}`.
    - `cpu`: compute on the CPU, also where there are accelerators.
    - `start_method`: "supervisor" (forked by a process that has touched no device), "fork", "spawn", or "auto".
    - `timeout`: seconds for the whole run; then every rank's stack is shown.
    - `results`: "main" for rank 0's return value, "all" for a list of every rank's.
    - `panel`: how the run is shown: "widget" for a live panel, "html" for one that needs no kernel, "text" for lines, `False`
      or "off" for results and errors only, or "auto" for what the place can show.
    - `config`: a whole configuration, such as a picker's `value`, in place of the environment and the file; what is said in
      the call beside it wins.
    - `config_file`: another configuration file; `""` for none.
    - `settings`: any other setting, such as `gradient_accumulation_steps`, `engine`, `folder` or `grace` (seconds in which
      processes may end by themselves after an interrupt).

    `node_rank`, `num_nodes`, `master_addr` and the `rdzv_*` are for several machines, which are not offered yet.

    Raises `WorkerError`, which is also an instance of the worker's own exception, if a process failed; `HangError` if the
    time was over; `ConfigurationError`, `NotYetError`, `PayloadError` or `LaunchError` before any process starts.

    >>> def train(epochs):
    ...     accelerator = Accelerator()
    ...     return accelerator.num_processes
    >>> notebook_launcher(train, args=(3,), num_processes=2, mixed_precision="bf16")
    2
    """
    __tracebackhide__ = True  # IPython shows the person's own frames alone
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
        **_shown(panel),
        **settings,
    }
    if already_launched(os.environ):
        return _called(function, args, _resolved_here(arguments, config_file, config))
    return _waited_for(_prepared(function, args, resolved(arguments, config_file, config)))


def debug_launcher(function: Callable[..., Any], args: Iterable[Any] = (), num_processes: int = 2) -> Any:
    """
    Run `function(*args)` on a few CPU processes, to find mistakes without a GPU; return what rank 0's call returned.

    It raises what `notebook_launcher` raises, and like it calls the function in processes that a launcher started already. No
    configuration file is read.

    >>> debug_launcher(train, args=(3,))
    """
    __tracebackhide__ = True  # IPython shows the person's own frames alone
    config = resolve({"num_processes": num_processes, "cpu": True, "mixed_precision": "no"}, {})
    if already_launched(os.environ):
        return _called(function, args, config)
    return _waited_for(_prepared(function, args, config))


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

    In a notebook the run's panel appears under the cell and lives on beside whatever is done next; lines of text are written
    where the run is waited for, or with `panel=True` under this cell, too. `panel=False` shows nothing but a word on a
    failure that nobody waits for; a text is the setting of that name, and `config` and `settings` are those of
    `notebook_launcher`.

    In processes that a launcher started already, each calls the function itself, as `notebook_launcher` says, and the run is
    over when it is given back: with every rank's result, numbers and last lines, and, where the processes share a disk, all
    that each rank has printed.

    Raises `ConfigurationError`, `NotYetError`, `PayloadError` or `LaunchError` before any process starts.

    >>> run = launch(train, args=(3,), num_processes=2, results="all")
    >>> run.wait()
    [2, 2]
    """
    __tracebackhide__ = True  # IPython shows the person's own frames alone
    call = partial(function, **kwargs) if kwargs else function
    if already_launched(os.environ):
        return _run_here(call, args, _resolved_here({**_shown(panel), **settings}, config_file, config))
    wish = resolved({**_shown(panel), **settings}, config_file, config)
    front_end = choosing.front_end(wish.launching, os.environ)
    run = _prepared(call, args, wish, front_end).start()
    if panel is True or choosing.shows_at_once(front_end):
        run.follow()
    return run


def _shown(panel: bool | str | None) -> dict[str, Any]:
    """What `panel` says, as the setting of that name."""
    if isinstance(panel, bool):
        return {} if panel else {"panel": "off"}
    return {"panel": panel}


def resolved(
    arguments: Mapping[str, Any],
    config_file: str | Path | None,
    whole: RunConfig | None = None,
    only: Collection[str] | None = None,
) -> RunConfig:
    """
    What was said here, and in a whole configuration or else in the environment and in a file, as one wish.

    With `only`, no other settings are taken from a file.
    """
    __tracebackhide__ = True  # IPython shows the person's own frames alone
    if whole is None:
        path = files.find(os.environ, config_file)
        content = files.read(path) if path is not None else None
        config = resolve(arguments, os.environ, content if content is None or only is None else _part(content, only))
    else:
        _check_whole(whole, config_file)
        config = resolve({**differing(whole), **said(arguments)}, {})
    return config


def _part(content: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Of a file's content what says these settings."""
    keys = {key for one in all_settings() if one.name in names for key in one.keys}
    return {key: value for key, value in content.items() if key in keys}


def _check_whole(config: RunConfig, config_file: str | Path | None) -> None:
    __tracebackhide__ = True  # IPython shows the person's own frames alone
    if not isinstance(config, RunConfig):
        raise ConfigurationError(
            f"config should be a RunConfig, but is {type(config).__name__} {config!r:.100}. "
            "Pass a picker's value, config=picker.value; a file is named by config_file=."
        )
    if config_file is not None:
        raise ConfigurationError(
            f"Both config and config_file={str(config_file)!r} were given, and each is a whole configuration. Pass one of them."
        )


def _resolved_here(arguments: Mapping[str, Any], config_file: str | Path | None, whole: RunConfig | None) -> RunConfig:
    """What is left to say in a process that was launched: how many there are and where, its launcher decided."""
    __tracebackhide__ = True  # IPython shows the person's own frames alone
    known = {one.name for one in all_settings()}
    names = {*(one.name for one in settings_of(Training)), "cpu", "folder", "results"}
    left = {name: value for name, value in arguments.items() if name in names or name not in known}
    config = resolved(left, config_file, whole, names)
    asked = said(arguments).get("num_processes") or (None if whole is None else whole.launching.num_processes)
    if asked is not None:
        tell_of_size(asked)
    return config


def _called(function: Callable[..., Any], args: Iterable[Any], config: RunConfig) -> Any:
    """What a launcher returns in processes that are there already."""
    __tracebackhide__ = True  # IPython shows the person's own frames alone
    call = Call(_checked(function), _as_arguments(args))
    return launched.called(call, _environ_here(config), config.launching.results)


def _run_here(function: Callable[..., Any], args: Iterable[Any], config: RunConfig) -> Run:
    """The run that a launch gives in processes that are there already."""
    __tracebackhide__ = True  # IPython shows the person's own frames alone
    call = Call(_checked(function), _as_arguments(args))
    run = prepare_present(call, config, _environ_here(config), choosing.Nothing()).start()
    if run.error is not None:
        sys.stderr.write(f"{run.name} has failed; wait() of its run raises why. Its output is in {run.folder}\n")
    return run


def _environ_here(config: RunConfig) -> dict[str, str]:
    """What an `Accelerator` is told in a process that was launched."""
    return {**config.training.environ(), "ACCELERATE_USE_CPU": str(config.launching.cpu).lower()}


def _waited_for(run: Run) -> Any:
    """What a run returns; at whatever moment an interrupt comes, it leaves no workers behind."""
    __tracebackhide__ = True  # IPython shows the person's own frames alone
    try:
        return run.start().wait()
    except KeyboardInterrupt:
        # one that came before the wait, which ends the workers at its own
        run.stop(timeout=0)
        raise


def _prepared(
    function: Callable[..., Any], args: Iterable[Any], config: RunConfig, front_end: FrontEnd | None = None
) -> Run:
    __tracebackhide__ = True  # IPython shows the person's own frames alone
    shown = front_end or choosing.front_end(config.launching, os.environ)
    return launching.prepare(_checked(function), _as_arguments(args), config, shown)


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    __tracebackhide__ = True  # IPython shows the person's own frames alone
    if not callable(function):
        raise ConfigurationError(
            f"A function is what a launcher runs, but {function!r} can't be called. "
            "Pass the function itself, without parentheses, and its arguments as args=(...)."
        )
    return function


def _as_arguments(args: Iterable[Any]) -> tuple[Any, ...]:
    """The function's arguments; one that was given bare, as in `args=(3)`, is told from several."""
    __tracebackhide__ = True  # IPython shows the person's own frames alone
    if isinstance(args, (str, bytes)) or not isinstance(args, Iterable):
        raise ConfigurationError(
            f"args should hold the function's arguments, but is {args!r}. Pass a tuple; one argument needs a comma: args=(x,)."
        )
    return tuple(args)


def _warm_in_a_notebook() -> None:
    """Start the supervisor where a notebook names a launcher: it is ready when the cell that launches is written."""
    if host(os.environ).kind == "jupyter" and warms_early(os.environ) and not already_launched(os.environ):
        warm()


_warm_in_a_notebook()

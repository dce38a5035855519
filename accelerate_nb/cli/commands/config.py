"""`accelerate-nb config`: the settings that every launch begins with are chosen, written, renewed and shown."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from accelerate_nb.cli.codes import INTERRUPTED
from accelerate_nb.cli.parser import add_settings, said_settings
from accelerate_nb.config import files, later, spelling, tpus
from accelerate_nb.config.basic import basic
from accelerate_nb.config.fields import GROUPS, Setting
from accelerate_nb.config.files import Draft
from accelerate_nb.config.run import all_settings, grouped, origin, resolve
from accelerate_nb.config.tpus import Tpus
from accelerate_nb.devices import xla
from accelerate_nb.devices.base import Devices
from accelerate_nb.devices.probe import probe
from accelerate_nb.errors import AccelerateNbError, ConfigurationError
from accelerate_nb.launching.choosing import accelerates_word, choose
from accelerate_nb.launching.preflight import Outlook, look_ahead

# How many cores a pod's machines have that nobody here can look at; all of them are taken.
_CORES_OF_A_POD = 8
_EPILOG = """\
commands:
  default   write a file for this machine as it is, without a question; a file that is there stays
  update    write a file of an earlier release of Accelerate as today's would
  show      show every setting, and where its value was said

examples:
  accelerate-nb config                             ask, show the file, write it
  accelerate-nb config --yes -n 2 --cpu            write what is said here, without a question
  accelerate-nb config --yes --tpu                 all cores of a TPU, through torch_xla
  accelerate-nb config default --mixed_precision bf16
  accelerate-nb config show

The file is Accelerate's own, and every launch begins with it: in notebooks, on the command line and in scripts.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Say which arguments the command takes."""
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = "accelerate-nb config [default | update | show] [--config_file PATH] [--yes] [settings]"
    parser.set_defaults(act=_ask, config_file=None)
    _add_file(parser)
    parser.add_argument(
        "--yes", action="store_true", help="Write what the flags and the present file say; ask nothing."
    )
    of_tpus = parser.add_argument_group("TPUs")
    of_tpus.add_argument("--tpu", action="store_true", help="Train on TPUs; as --engine xla.")
    of_tpus.add_argument(*("--tpu-name", "--tpu_name"), metavar="NAME", help="The name of a pod of them.")
    of_tpus.add_argument(*("--tpu-zone", "--tpu_zone"), metavar="ZONE", help="The zone of Google's cloud it is in.")
    add_settings(parser, chain.from_iterable(grouped().values()))
    commands = parser.add_subparsers(metavar="COMMAND", help=argparse.SUPPRESS)
    default = commands.add_parser("default", description="Write a file for this machine as it is.")
    _add_file(default)
    default.add_argument("--force", action="store_true", help="Write over a file that is there.")
    add_settings(default, [_precision()])
    default.set_defaults(act=_default)
    update = commands.add_parser("update", description="Write a file of an earlier release as today's would.")
    _add_file(update)
    update.set_defaults(act=_update)
    show = commands.add_parser("show", description="Show every setting, and where its value was said.")
    _add_file(show)
    show.set_defaults(act=_show)


def run(arguments: argparse.Namespace) -> int:
    """Do it; gives the exit code."""
    code: int = arguments.act(arguments)
    return code


def _add_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        *("--config_file", "--config-file"),
        metavar="PATH",
        default=argparse.SUPPRESS,
        help="The configuration file; without it, the one that every launch reads.",
    )


def _precision() -> Setting:
    return next(one for one in all_settings() if one.name == "mixed_precision")


def _place(arguments: argparse.Namespace) -> Path:
    """Where the file is, or will be."""
    said = arguments.config_file or os.environ.get("ACCELERATE_NB_CONFIG_FILE")
    return Path(said).expanduser() if said else files.default_place(os.environ)


# ------------------------------------------------------------------------------------------------------------ choosing


def _ask(arguments: argparse.Namespace) -> int:
    said = _said(arguments)
    path = _place(arguments)
    content = _present(path)
    found = _said_of_tpus(arguments, tpus.of(content))
    values = {one.name: origin(one, said, {}, content).value for one in all_settings()}
    if arguments.yes:
        on_tpus = found if values["engine"] == "xla" else None
        draft = _draft(path, _looked_at(values, _devices(on_tpus)), on_tpus)
        draft.write()
        return _told(draft)
    if not sys.stdin.isatty():
        raise ConfigurationError(
            "The settings were to be asked for, but there is no terminal to answer in. Pass --yes, and settings as flags "
            "(accelerate-nb config --yes --num-processes 2), or write a file for this machine with `accelerate-nb config "
            "default`."
        )
    try:
        return _asked(path, values, found)
    except (KeyboardInterrupt, EOFError):
        print("\nNothing was written.", file=sys.stderr)
        return INTERRUPTED


def _said(arguments: argparse.Namespace) -> dict[str, Any]:
    said = said_settings(arguments, all_settings())
    if not (arguments.tpu or arguments.tpu_name):
        return said
    if said.get("cpu") or said.get("engine", "xla") != "xla":
        raise ConfigurationError("A TPU was asked for, together with another place to train. Leave one of them out.")
    return {**said, "engine": "xla", "cpu": False}


def _said_of_tpus(arguments: argparse.Namespace, present: Tpus) -> Tpus:
    """What the file says of TPUs, with what the flags say instead."""
    zoned = replace(present, zone=arguments.tpu_zone or present.zone)
    return replace(zoned, name=arguments.tpu_name, is_pod=True) if arguments.tpu_name else zoned


def _devices(on_tpus: Tpus | None) -> Devices:
    """What a launch computes on: what is here, or what a pod's machines are taken to have."""
    here = probe()
    if on_tpus is None or not on_tpus.is_pod:
        return here
    found = xla.Found("TPU", _CORES_OF_A_POD)
    return Devices("xla", found.label, found.count, here.cores, xla=found)


def _present(path: Path) -> dict[str, Any]:
    """What the file says already; one that asks for what is not offered is not written over."""
    content = files.read(path) if path.is_file() else {}
    later.refuse(content, f"The configuration file {path}")
    return content


def _asked(path: Path, values: Mapping[str, Any], present: Tpus) -> int:
    from accelerate_nb.cli import questions

    chosen: Tpus | None = None
    usual = values["engine"] == "xla" or (probe().kind == "xla" and not values["cpu"])
    if questions.is_on_tpus(is_usual=usual):
        chosen = questions.of_tpus(present)
        values = {**values, "engine": "xla", "cpu": False, **({"num_processes": None} if chosen.is_pod else {})}
    elif values["engine"] == "xla":
        values = {**values, "engine": "auto"}
    said, outlook = questions.ask(values, _devices(chosen), can_fork=hasattr(os, "fork"), tpus=chosen)
    if chosen is not None and said.get("mixed_precision") == "bf16":
        chosen = replace(chosen, downcasts=questions.downcasts(is_usual=chosen.downcasts))
    draft = _draft(path, outlook, chosen)
    print(f"\n{draft.path}{' (there is one already)' if draft.replaces else ''}:\n")
    print("".join(f"  {line}\n" for line in draft.text.splitlines()))
    if draft.kept:
        print(f"Kept of the present file: {', '.join(draft.kept)}.")
    if draft.comments:
        print("The present file has comments, which go.")
    if not questions.agrees("Write it?"):
        print("Nothing was written.", file=sys.stderr)
        return 1
    draft.write()
    return _told(draft)


def _looked_at(values: Mapping[str, Any], devices: Devices) -> Outlook:
    """What would become of a launch with these settings; what speaks against it is raised."""
    said = {one.name: values[one.name] for one in all_settings() if values[one.name] != one.default}
    outlook = look_ahead(said, devices, can_fork=hasattr(os, "fork"))
    if not outlook.possible:
        raise ConfigurationError(" ".join(one.text for one in outlook.objections if one.grave))
    return outlook


def _draft(path: Path, outlook: Outlook, on_tpus: Tpus | None) -> Draft:
    assert outlook.config is not None, "nothing grave speaks against it"
    assert outlook.choice is not None, "nothing grave speaks against it"
    content = spelling.keys(outlook.config, accelerates_word(outlook.choice, probe()))
    return files.draft(path, content if on_tpus is None else {**content, **on_tpus.keys()})


def _told(draft: Draft) -> int:
    print(f"Written to {draft.path}. {_how_to_use(draft.path)}")
    return 0


def _how_to_use(path: Path) -> str:
    if path == files.default_place(os.environ):
        return "Every launch takes from it what is not said elsewhere."
    return f"Launch with --config_file {path}, or config_file={str(path)!r} in a notebook."


# --------------------------------------------------------------------------------------------------- without a question


def _default(arguments: argparse.Namespace) -> int:
    said = said_settings(arguments, [_precision()])
    path = _place(arguments)
    if path.exists() and not arguments.force:
        print(f"There is a configuration file at {path} already, and it stays. Pass --force to write over it.")
        return 0
    found = probe()
    content = basic(
        said.get("mixed_precision", "no"),
        distributed_type=_usual_word(),
        num_processes=max(1, found.count),
        cpu=found.count == 0,
    )
    draft = Draft(path, content, replaces=path.exists())
    draft.write()
    return _told(draft)


def _update(arguments: argparse.Namespace) -> int:
    path = _place(arguments)
    if not path.is_file():
        raise ConfigurationError(
            f"The configuration file {path} was to be updated, and is not there. Correct its path, or write one with "
            "`accelerate-nb config`."
        )
    draft = files.renewed(path, _usual_word())
    before = path.read_text(encoding="utf-8")
    if draft.text == before:
        print(f"{path} is as today's Accelerate writes it; nothing was changed.")
        return 0
    draft.write()
    changes = difflib.unified_diff(before.splitlines(), draft.text.splitlines(), "before", "now", lineterm="", n=1)
    print("\n".join(changes))
    if draft.comments:
        print("The comments that were in it are gone.")
    return _told(draft)


def _usual_word() -> str:
    """What Accelerate's files call a launch of this machine's own."""
    found = probe()
    return accelerates_word(choose(resolve({}, {}).launching, found, can_fork=hasattr(os, "fork")), found)


# ------------------------------------------------------------------------------------------------------------- showing


def _show(arguments: argparse.Namespace) -> int:
    path = files.find(os.environ, arguments.config_file)
    content = files.read(path) if path is not None else {}
    print(f"Configuration file: {path or f'none ({files.default_place(os.environ)} is not there)'}")
    wrong: list[str] = []
    if what := later.asked(content):
        wrong.append(f"The configuration file {path} asks for {what}, which is not offered here yet.")
    for key, own in grouped().items():
        print(f"\n{GROUPS[key]}")
        print("\n".join(_rows(own, content, wrong)))
    if tpus.are_meant(content):
        print("\nTPUs")
        print("\n".join(_rows_of_tpus(content, wrong)))
    for text in wrong:
        print(f"\n{text}", file=sys.stderr)
    return 1 if wrong else 0


def _rows(own: Sequence[Setting], content: Mapping[str, Any], wrong: list[str]) -> Iterator[str]:
    names, values = max(len(one.name) for one in own), 12
    for one in own:
        try:
            found = origin(one, {}, os.environ, content)
        except AccelerateNbError as error:
            wrong.append(str(error))
            continue
        yield f"  {one.name:<{names}}  {found.value!s:<{values}}  {found.place or 'default'}".rstrip()


def _rows_of_tpus(content: Mapping[str, Any], wrong: list[str]) -> Iterator[str]:
    try:
        found = tpus.of(content).keys()
    except AccelerateNbError as error:
        wrong.append(str(error))
        return
    for key, value in found.items():
        yield f"  {key:<22}  {value!s:<12}  {'the configuration file' if key in content else 'default'}"

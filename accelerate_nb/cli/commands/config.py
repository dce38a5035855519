"""`accelerate-nb config`: the settings that every launch begins with are chosen, written, renewed and shown."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate_nb.cli.exit_codes import INTERRUPTED
from accelerate_nb.cli.parser import add_settings, given_settings
from accelerate_nb.config import formats, hf_files, hf_keys
from accelerate_nb.config.hf_files import ConfigDraft, basic
from accelerate_nb.config.hf_keys import TpusConfig, first_unsupported, refuse_unsupported
from accelerate_nb.config.run_config import all_settings, changed, grouped, origin, resolve, setting_named
from accelerate_nb.config.settings import GROUPS, Setting
from accelerate_nb.config.value_types import Boolean, NamedValues, OneOf, Text
from accelerate_nb.devices.probe import AvailableDevices, pod, probe
from accelerate_nb.errors import AccelerateNbError, ConfigurationError

if TYPE_CHECKING:
    from accelerate_nb.launching.planning.preflight import PreflightReport

# Settings with a prompt for everybody; the others are prompted for only where the user picks their group.
FIRST = ("cpu", "num_processes", "mixed_precision", "gradient_accumulation_steps")
# Settings that follow from a launch on TPUs, and on those of a pod.
_SET_BY_TPUS = ("cpu", "engine")
_SET_BY_A_POD = (*_SET_BY_TPUS, "num_processes")
_LEFT_OPEN = "left open"
_YES_OR_NO: list[tuple[str, Any]] = [("yes", True), ("no", False)]
_NO_OR_YES = _YES_OR_NO[::-1]
# A list gives a choice's title in place of a value that is None.
_OPEN: Any = object()
# The number of chips of a machine of a TPU v4 pod, which can't be probed from here; all of them are used.
_CHIPS_OF_A_POD = 4
_EPILOG = """\
commands:
  default   write a file for this machine as it is, without a question; an existing file is kept
  update    write a file of an earlier release of Accelerate as today's would
  show      show every setting, with its value and its origin

examples:
  accelerate-nb config                             ask, show the file, write it
  accelerate-nb config --yes -n 2 --cpu            write these settings, without a question
  accelerate-nb config --yes --tpu                 all chips of a TPU, through torch_xla
  accelerate-nb config default --mixed_precision bf16
  accelerate-nb config show

The file is Accelerate's own, and every launch begins with it: in notebooks, on the command line and in scripts.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.epilog = _EPILOG
    parser.usage = "accelerate-nb config [default | update | show] [--config_file PATH] [--yes] [settings]"
    parser.set_defaults(act=_prompt, config_file=None)
    _add_file(parser)
    parser.add_argument(
        "--yes",
        action="store_true",
        help="Write the settings of the flags and of the existing file, without a question.",
    )
    of_tpus = parser.add_argument_group("TPUs")
    of_tpus.add_argument("--tpu", action="store_true", help="Train on TPUs; as --engine xla.")
    of_tpus.add_argument(*("--tpu-name", "--tpu_name"), metavar="NAME", help="The name of a pod of them.")
    of_tpus.add_argument(*("--tpu-zone", "--tpu_zone"), metavar="ZONE", help="The zone of Google's cloud it is in.")
    add_settings(parser, chain.from_iterable(grouped().values()))
    commands = parser.add_subparsers(metavar="COMMAND", help=argparse.SUPPRESS)
    default = commands.add_parser("default", description="Write a file for this machine as it is.")
    _add_file(default)
    default.add_argument("--force", action="store_true", help="Overwrite an existing file.")
    add_settings(default, [setting_named("mixed_precision")])
    default.set_defaults(act=_default)
    update = commands.add_parser("update", description="Write a file of an earlier release as today's would.")
    _add_file(update)
    update.set_defaults(act=_update)
    show = commands.add_parser("show", description="Show every setting, with its value and its origin.")
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


def _config_path(arguments: argparse.Namespace) -> Path:
    """The path of the file, which may not exist yet."""
    if arguments.config_file == "":
        raise ConfigurationError(
            "--config_file was given an empty path. Name a file, or leave it out for the usual one."
        )
    file = arguments.config_file or os.environ.get("ACCELERATE_NB_CONFIG_FILE")
    return Path(file).expanduser() if file else hf_files.default_path(os.environ)


# ------------------------------------------------------------------------------------------------------------ choosing


def _prompt(arguments: argparse.Namespace) -> int:
    given = _given(arguments)
    path = _config_path(arguments)
    content = hf_files.read(path) if os.path.isfile(path) else {}
    # a file that requests what is not offered is not overwritten
    refuse_unsupported(content, f"The configuration file {path}")
    found = hf_keys.tpus_of(content)
    # the flags win over the file
    found = replace(found, zone=arguments.tpu_zone or found.zone)
    if arguments.tpu_name:
        found = replace(found, name=arguments.tpu_name, is_pod=True)
    values = {setting.name: origin(setting, given, {}, content).value for setting in all_settings()}
    if arguments.yes:
        from accelerate_nb.launching.planning.preflight import run_preflight

        on_tpus = found if values["engine"] == "xla" else None
        outlook = run_preflight(changed(values), _devices(on_tpus), can_fork=hasattr(os, "fork"))
        if not outlook.possible:
            raise ConfigurationError(" ".join(objection.text for objection in outlook.objections if objection.grave))
        return _written_to(_draft(path, outlook, on_tpus))
    # Python has none where the shell closed it
    if sys.stdin is None or not sys.stdin.isatty():
        raise ConfigurationError(
            "The settings were to be prompted for, but there is no terminal. Pass --yes, and settings as flags "
            "(accelerate-nb config --yes --num-processes 2), or write a file for this machine with `accelerate-nb config "
            "default`."
        )
    try:
        return _prompted(path, values, found)
    except (KeyboardInterrupt, EOFError):
        print("\nNothing was written.", file=sys.stderr)
        return INTERRUPTED


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    given = given_settings(arguments, all_settings())
    if not (arguments.tpu or arguments.tpu_name):
        return given
    if given.get("cpu") or given.get("engine", "xla") != "xla":
        raise ConfigurationError("A TPU was requested, together with another device. Leave one of them out.")
    return {**given, "engine": "xla", "cpu": False}


def _devices(on_tpus: TpusConfig | None) -> AvailableDevices:
    """The devices of a launch: those of this machine, or those that a pod's machines are taken to have."""
    return probe() if on_tpus is None or not on_tpus.is_pod else pod(_CHIPS_OF_A_POD)


def _prompted(path: Path, values: Mapping[str, Any], current: TpusConfig) -> int:
    chosen: TpusConfig | None = None
    usual = values["engine"] == "xla" or (probe().kind == "xla" and not values["cpu"])
    machines = [("this machine: its GPUs, or its CPU", False), ("TPU: this machine's, or those of a pod", True)]
    if _chosen("What does it train on?", machines, usual):
        chosen = _of_tpus(current)
        values = {**values, "engine": "xla", "cpu": False, **({"num_processes": None} if chosen.is_pod else {})}
    elif values["engine"] == "xla":
        values = {**values, "engine": "auto"}
    given, outlook = prompt(values, _devices(chosen), can_fork=hasattr(os, "fork"), tpus=chosen)
    if chosen is not None and given.get("mixed_precision") == "bf16":
        question = "With bf16, should float64 become float32, not bfloat16? [downcast_bf16]"
        chosen = replace(chosen, downcasts=_chosen(question, _NO_OR_YES, chosen.downcasts))
    draft = _draft(path, outlook, chosen)
    print(f"\n{draft.path}{' (exists already)' if draft.replaces else ''}:\n")
    print("".join(f"  {line}\n" for line in draft.text.splitlines()))
    if draft.kept:
        print(f"Kept from the existing file: {', '.join(draft.kept)}.")
    if draft.comments:
        print("The comments of the existing file are dropped.")
    if not _chosen("Write it?", _YES_OR_NO, True):
        print("Nothing was written.", file=sys.stderr)
        return 1
    return _written_to(draft)


def _draft(path: Path, outlook: PreflightReport, on_tpus: TpusConfig | None) -> ConfigDraft:
    assert outlook.config is not None, "nothing grave speaks against it"
    assert outlook.choice is not None, "nothing grave speaks against it"
    from accelerate_nb.launching.planning.placement import accelerates_word

    content = formats.keys(outlook.config, accelerates_word(outlook.choice, probe()))
    return hf_files.draft(path, content if on_tpus is None else {**content, **on_tpus.keys()})


def _written_to(draft: ConfigDraft, note: str = "") -> int:
    """Write a file, and print how it is used; gives the exit code."""
    draft.write()
    if note:
        print(note)
    how = f"Launch with --config_file {draft.path}, or config_file={str(draft.path)!r} in a notebook."
    if draft.path == hf_files.default_path(os.environ):
        how = "Every launch takes from it what is not set elsewhere."
    print(f"Written to {draft.path}. {how}")
    return 0


# --------------------------------------------------------------------------------------------------- without a question


def _default(arguments: argparse.Namespace) -> int:
    given = given_settings(arguments, [setting_named("mixed_precision")])
    path = _config_path(arguments)
    if os.path.isfile(path) and not arguments.force:
        print(f"The configuration file {path} exists already and was kept. Pass --force to overwrite it.")
        return 0
    found = probe()
    content = basic(
        given.get("mixed_precision", "no"),
        distributed_type=_usual_word(),
        num_processes=max(1, found.count),
        cpu=found.count == 0,
    )
    return _written_to(ConfigDraft(path, content, replaces=os.path.exists(path)))


def _update(arguments: argparse.Namespace) -> int:
    path = _config_path(arguments)
    if not os.path.exists(path):
        raise ConfigurationError(
            f"The configuration file {path} was to be updated, and does not exist. Correct its path, or write one with "
            "`accelerate-nb config`."
        )
    draft = hf_files.renewed(path, _usual_word())
    before = path.read_text(encoding="utf-8")
    if draft.text == before:
        print(f"{path} has today's format already; nothing was changed.")
        return 0
    changes = difflib.unified_diff(before.splitlines(), draft.text.splitlines(), "before", "now", lineterm="", n=1)
    return _written_to(draft, "\n".join([*changes, *(["Its comments were dropped."] if draft.comments else [])]))


def _usual_word() -> str:
    """The name of a launch on this machine in Accelerate's files."""
    found = probe()
    from accelerate_nb.launching.planning.placement import accelerates_word, choose

    return accelerates_word(choose(resolve({}, {}).launching, found, can_fork=hasattr(os, "fork")), found)


# ------------------------------------------------------------------------------------------------------------- showing


def _show(arguments: argparse.Namespace) -> int:
    path = hf_files.find(os.environ, arguments.config_file)
    content = hf_files.read(path) if path is not None else {}
    print(f"Configuration file: {path or f'none ({hf_files.default_path(os.environ)} is not there)'}")
    wrong: list[str] = []
    if what := first_unsupported(content):
        wrong.append(f"The configuration file {path} requests {what}, which is not offered here yet.")
    for key, members in grouped().items():
        print(f"\n{GROUPS[key]}")
        width = max(len(item.name) for item in members)
        for item in members:
            try:
                found = origin(item, {}, os.environ, content)
            except AccelerateNbError as error:
                wrong.append(str(error))
                continue
            print(f"  {item.name:<{width}}  {found.value!s:<12}  {found.source or 'default'}")
    if hf_keys.file_is_for_tpus(content):
        print("\nTPUs")
        try:
            of_tpus = hf_keys.tpus_of(content).keys()
        except AccelerateNbError as error:
            of_tpus = {}
            wrong.append(str(error))
        for key, value in of_tpus.items():
            print(f"  {key:<22}  {value!s:<12}  {'the configuration file' if key in content else 'default'}")
    for text in wrong:
        print(f"\n{text}", file=sys.stderr)
    return 1 if wrong else 0


# ------------------------------------------------------------------------------ questions, in the terminal, with arrow keys


def prompt(
    current: Mapping[str, Any], devices: AvailableDevices, *, can_fork: bool, tpus: TpusConfig | None = None
) -> tuple[dict[str, Any], PreflightReport]:
    """The settings that a user chooses, starting from the `current` values, and a preview of a launch with them."""
    # Values that are impossible with these devices are reported, and prompted for again; what follows from `tpus` is
    # not. `KeyboardInterrupt` where the user leaves, `ConfigurationError` for what no setting can mend.
    from accelerate_nb.launching.planning.preflight import run_preflight

    known = {setting.name: setting for setting in all_settings()}
    values = dict(current)
    settled = () if tpus is None else _SET_BY_A_POD if tpus.is_pod else _SET_BY_TPUS
    for name in FIRST:
        if name not in settled:
            values[name] = _reply(known[name], values[name], devices)
    for item in _more(settled):
        values[item.name] = _reply(item, values[item.name], devices)
    while not (outlook := run_preflight(changed(values), devices, can_fork)).possible:
        for objection in (entry for entry in outlook.objections if entry.grave):
            if objection.name is None:
                raise ConfigurationError(objection.text)
            print(f"  {objection.text}")
            values[objection.name] = _reply(known[objection.name], values[objection.name], devices)
    for objection in outlook.objections:
        print(f"  {objection.text}")
    return changed(values), outlook


def _of_tpus(current: TpusConfig) -> TpusConfig:
    """The TPU settings that a user enters, starting from the `current` ones."""
    question = "The function of the script that each chip calls; 'main' runs the script"
    function = _line(question, current.function or "main").strip()
    one_machine = replace(current, function=None if function in {"", "main"} else function, is_pod=False)
    if not _chosen("Are they a pod, several machines of them?", _NO_OR_YES, current.is_pod):
        return one_machine
    return replace(
        one_machine,
        is_pod=True,
        name=_line(
            "The pod's name in Google's cloud", current.name or "", lambda text: bool(text) or "It has one."
        ).strip(),
        zone=_line("Its zone; without one, that of `gcloud config`", current.zone or "").strip() or None,
        sudo=_chosen("Should its machines use sudo?", _NO_OR_YES, current.sudo),
        environment=tuple(
            filter(None, _line("Variables on its machines: A=1,B=2", ",".join(current.environment)).strip().split(","))
        ),
    )


def _line(question: str, suggested: str, is_fine: Callable[[str], bool | str] = lambda _: True) -> str:
    import questionary

    reply: str = questionary.text(question, default=suggested, validate=is_fine).unsafe_ask()
    return reply


def _more(settled: Iterable[str]) -> Iterable[Setting]:
    """The settings of the groups that the user picks."""
    import questionary

    shown = {*FIRST, *settled}
    groups = {key: [item for item in members if item.name not in shown] for key, members in grouped().items()}
    picked = questionary.checkbox(
        "More settings? Space picks a group, Enter goes on.",
        choices=[
            questionary.Choice(f"{GROUPS[key]}: {', '.join(item.name for item in members)}", value=key)
            for key, members in groups.items()
            if members
        ],
        instruction=" ",
    ).unsafe_ask()
    return [group for key in picked for group in groups[key]]


def _reply(setting: Setting, value: Any, devices: AvailableDevices) -> Any:
    question = f"{setting.help} [{setting.name}]"
    if isinstance(setting.value_type, (Boolean, OneOf)):
        choices: list[tuple[str, Any]] = [(_LEFT_OPEN, None)] if setting.nullable else []
        choices += [(choice, choice) for choice in setting.choices] or _YES_OR_NO
        return _chosen(question, choices, value, setting.unsupported)
    if value is None:
        # of a TPU all chips are what is meant, however many a machine has
        is_counted = setting.name == "num_processes" and devices.kind != "xla"
        suggested = str(max(1, devices.count)) if is_counted else ""
    elif isinstance(setting.value_type, NamedValues):
        suggested = json.dumps(value)
    else:
        suggested = f"{value:g}" if isinstance(value, float) else str(value)

    def parsed(text: str) -> Any:
        # a text is taken as it is, since a template may well end with a space; an empty line leaves the setting open
        line = text if isinstance(setting.value_type, Text) else text.strip()
        return setting.parse(line, f"{setting.name} was given as") if line else setting.default

    def is_fine(text: str) -> bool | str:
        try:
            parsed(text)
        except AccelerateNbError as error:
            return str(error)
        return True

    return parsed(_line(question, suggested, is_fine))


def _chosen(question: str, choices: list[tuple[str, Any]], value: Any, unsupported: Iterable[str] = ()) -> Any:
    import questionary

    listed = [questionary.Choice(title, value=_OPEN if choice is None else choice) for title, choice in choices]
    current = next((item for item, (_, entry) in zip(listed, choices, strict=True) if entry == value), None)
    not_yet = [questionary.Choice(word, disabled="not offered yet") for word in unsupported]
    reply = questionary.select(question, choices=[*listed, *not_yet], default=current, instruction=" ").unsafe_ask()
    return None if reply is _OPEN else reply

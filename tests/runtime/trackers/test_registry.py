"""What `log_with` names is what a run gets, or an error says why not."""

import warnings
from operator import attrgetter

import pytest

from accelerate_nb import Accelerator
from accelerate_nb.errors import ConfigurationError, MissingExtraError
from accelerate_nb.runtime.trackers.aim import AimTracker
from accelerate_nb.tracking import (
    LOGGER_TYPE_TO_CLASS,
    GeneralTracker,
    filter_trackers,
    get_available_trackers,
    register_tracker_class,
)
from accelerate_nb.utils import LoggerType
from tests.peers import under_both
from tests.ranks import run_on_ranks
from tests.runtime.trackers.test_packages import needs


class Own(GeneralTracker):
    name = "own"
    requires_logging_directory = False
    tracker = None


def choose(peer):
    """What each wish gives, or the class of error that Accelerate raises for it."""
    door, kinds = peer.door("tracking"), peer.door("utils").LoggerType
    own = {"name": "own", "requires_logging_directory": False, "tracker": None}
    tracker = type("Own", (door.GeneralTracker,), own)()
    in_a_folder = [
        *("tensorboard", kinds.TENSORBOARD, ["tensorboard", kinds.TENSORBOARD, "tensorboard"], ("tensorboard",)),
        *("nonsense", [tracker, "tensorboard"], "all", [tracker, kinds.ALL, "tensorboard"], type(tracker), 3),
    ]
    found = [tracker_names(door.filter_trackers, wish, None) for wish in (None, [], "tensorboard", tracker)]
    return [*found, *(tracker_names(door.filter_trackers, wish, "logs") for wish in in_a_folder)]


def tracker_names(function, *arguments):
    try:
        return sorted("own" if type(item).__name__ == "Own" else str(item) for item in function(*arguments))
    except ValueError:
        return "ValueError"


@needs("tensorboard")
def test_the_same_requests_give_the_same_trackers():
    both = under_both(choose, 1)
    assert both.theirs == both.ours
    assert both.ours[0][6] == ["tensorboard"]


def test_a_missing_package_that_was_requested_is_an_error_that_names_its_extra(monkeypatch, tmp_path):
    monkeypatch.setattr(AimTracker, "_is_available", staticmethod(lambda: False))
    with pytest.raises(MissingExtraError, match=r"log_with='aim' .* pip install 'accelerate-nb\[aim\]'"):
        Accelerator(log_with="aim", project_dir=tmp_path, cpu=True)
    assert "aim" not in filter_trackers("all", tmp_path)
    assert LoggerType.AIM not in get_available_trackers()


def test_all_with_nothing_installed_is_a_run_with_the_panel_alone(monkeypatch, tmp_path):
    for tracker in LOGGER_TYPE_TO_CLASS.values():
        monkeypatch.setattr(tracker, "_is_available", staticmethod(lambda: False))
    accelerator = Accelerator(log_with="all", project_dir=tmp_path, cpu=True)
    accelerator.init_trackers("digits", {"lr": 1})
    accelerator.log({"loss": 1})
    accelerator.end_training()
    assert (accelerator.log_with, accelerator.trackers) == ([], [])


@needs("tensorboard")
def test_all_leaves_out_what_has_no_folder_to_write_to():
    with pytest.warns(UserWarning, match=r"leaves out .*tensorboard.*Pass `project_dir`"):
        assert "tensorboard" not in filter_trackers("all")


def test_an_unknown_name_lists_the_known_ones_and_what_needs_a_folder_names_the_argument_that_gives_it(monkeypatch):
    with pytest.raises(ConfigurationError, match=r"log_with='tensorbord'.*all, tensorboard, wandb"):
        Accelerator(log_with="tensorbord", cpu=True)
    monkeypatch.setattr(AimTracker, "_is_available", staticmethod(lambda: True))
    with pytest.raises(ConfigurationError, match=r"`aim` requires a `logging_dir`.*Pass `project_dir`"):
        filter_trackers("aim")


def register(peer, folder):
    """What becomes of a class that is registered: how it is made, and what is said of unfit ones."""
    door = peer.door("tracking")
    made = []

    class Mine(door.GeneralTracker):
        name = "mine"
        requires_logging_directory = True
        tracker = None

        def __init__(self, *args, **kwargs):
            super().__init__()
            made.append((args, kwargs))

    unfit = [
        *(3, dict, Mine()),
        type("A", (door.GeneralTracker,), {"requires_logging_directory": True}),
        type("B", (door.GeneralTracker,), {"name": "", "requires_logging_directory": True}),
        type("C", (door.GeneralTracker,), {"name": "c"}),
    ]
    refused = [tracker_names(door.register_tracker_class, item) for item in unfit]
    made.clear()
    door.register_tracker_class(Mine)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        door.register_tracker_class(Mine)
    accelerator = peer.Accelerator(log_with=["mine", "mine"], project_dir=folder)
    accelerator.init_trackers("digits", {"lr": 1}, {"mine": {"colour": "red"}, "other": {"a": 1}})
    homeless = tracker_names(door.filter_trackers, "mine")
    return refused, made, len(caught), homeless, door.LOGGER_TYPE_TO_CLASS["mine"] is Mine


def test_a_class_of_ones_own_is_known_by_its_name_once_registered(tmp_path):
    both = under_both(register, 1, str(tmp_path))
    assert both.theirs == both.ours
    refused, made, warned, homeless, known = both.ours[0]
    assert (set(refused), warned, homeless, known) == ({"ValueError"}, 1, "ValueError", True)
    assert made == [(("digits", str(tmp_path)), {"colour": "red"})]


def shadow():
    register_tracker_class(type("Wandb", (Own,), {"name": "wandb"}))
    return [str(filter_tracker) for filter_tracker in filter_trackers("wandb")]


@pytest.mark.filterwarnings("ignore:Wandb replaces")
def test_a_class_that_takes_the_place_of_a_known_one_needs_no_package():
    assert run_on_ranks(shadow, 1) == [["wandb"]]


def test_the_known_names_are_accelerates():
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS as theirs

    facts = attrgetter("__name__", "main_process_only", "requires_logging_directory")
    ours, their = ({name: facts(kind) for name, kind in kinds.items()} for kinds in (LOGGER_TYPE_TO_CLASS, theirs))
    assert ours == their

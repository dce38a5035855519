"""The import path `accelerate.tracking`: trackers under Hugging Face's module name."""

from accelerate_nb.runtime.trackers.aim import AimTracker as AimTracker
from accelerate_nb.runtime.trackers.base import GeneralTracker as GeneralTracker, on_main_process as on_main_process
from accelerate_nb.runtime.trackers.clearml import ClearMLTracker as ClearMLTracker
from accelerate_nb.runtime.trackers.comet import CometMLTracker as CometMLTracker
from accelerate_nb.runtime.trackers.dvclive import DVCLiveTracker as DVCLiveTracker
from accelerate_nb.runtime.trackers.mlflow import MLflowTracker as MLflowTracker
from accelerate_nb.runtime.trackers.registry import (
    LOGGER_TYPE_TO_CLASS as LOGGER_TYPE_TO_CLASS,
    filter_trackers as filter_trackers,
    get_available_trackers as get_available_trackers,
    register_tracker_class as register_tracker_class,
)
from accelerate_nb.runtime.trackers.swanlab import SwanLabTracker as SwanLabTracker
from accelerate_nb.runtime.trackers.tensorboard import TensorBoardTracker as TensorBoardTracker
from accelerate_nb.runtime.trackers.trackio import TrackioTracker as TrackioTracker
from accelerate_nb.runtime.trackers.wandb import WandBTracker as WandBTracker

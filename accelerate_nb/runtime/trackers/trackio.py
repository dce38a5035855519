"""Trackio, Hugging Face's tracker that keeps runs in a local database."""

from typing import Any, ClassVar

from accelerate_nb.runtime.compat.packages import is_trackio_available
from accelerate_nb.runtime.trackers.base import RunTracker, all_on_main_process, settings


@all_on_main_process
class TrackioTracker(RunTracker):
    """A run of the project `run_name`; further arguments go to `trackio.init`. The run is also the attribute `run`."""

    name: ClassVar[str] = "trackio"
    _is_available = staticmethod(is_trackio_available)

    def start(self) -> None:
        import trackio

        self.run = trackio.init(project=self.run_name, **self.init_kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the settings with the run; trackio writes them with the first values that are logged."""
        # a plain dictionary: wandb's `allow_val_change=True` would be kept as one more setting
        self.run.config.update(settings(values))

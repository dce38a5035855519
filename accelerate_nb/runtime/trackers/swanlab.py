"""SwanLab."""

from typing import Any, ClassVar

from accelerate_nb.runtime.compat.packages import is_swanlab_available
from accelerate_nb.runtime.trackers.base import RunTracker, all_on_main_process, settings


@all_on_main_process
class SwanLabTracker(RunTracker):
    """A run of the project `run_name`; further arguments go to `swanlab.init`. The run is also the attribute `run`."""

    name: ClassVar[str] = "swanlab"
    _is_available = staticmethod(is_swanlab_available)

    def start(self) -> None:
        import swanlab

        self.run = swanlab.init(project=self.run_name, **self.init_kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the settings as the run's config; what is there under the same names is replaced."""
        import swanlab

        # without wandb's `allow_val_change=True`: SwanLab would keep it as one more setting
        swanlab.config.update(settings(values))

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep lists of pictures (arrays, tensors or PIL's images) by name."""
        import swanlab

        for name, images in values.items():
            self.log({name: [swanlab.Image(image) for image in images]}, step=step, **kwargs)

"""TensorBoard, by torch's writer or by tensorboardX."""

import os
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from accelerate_nb.runtime.compat.packages import is_tensorboard_available
from accelerate_nb.runtime.trackers.base import PackageTracker, all_on_main_process, flat, logger, plain, settings


@all_on_main_process
class TensorBoardTracker(PackageTracker):
    """
    Event files in `logging_dir/run_name`; further arguments go to `SummaryWriter`.

    Attributes that scripts use: `writer`, `logging_dir` (the run's own folder, known once started), `run_name`.
    """

    name: ClassVar[str] = "tensorboard"
    requires_logging_directory: ClassVar[bool] = True
    _is_available = staticmethod(is_tensorboard_available)

    writer: Any
    logging_dir: str

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.logging_dir_param = logging_dir

    def start(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError:
            from tensorboardX import SummaryWriter  # type: ignore[no-redef]  # the same interface
        self.logging_dir = os.path.join(self.logging_dir_param, self.run_name)
        self.writer = SummaryWriter(self.logging_dir, **self.init_kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """
        Keep the settings as hyperparameters, and in a file `hparams.yml` beside the event files.

        TensorBoard knows numbers, strings and booleans: others are kept by their `str`, nested names joined by a slash.
        """
        import yaml

        kept = settings(values)
        shown = {name: item if isinstance(item, (bool, int, float, str)) else str(item) for name, item in flat(kept)}
        self.writer.add_hparams(shown, metric_dict={})
        self.writer.flush()
        folder = Path(self.logging_dir, str(time.time()))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hparams.yml").write_text(yaml.dump(kept), encoding="utf-8")

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep numbers as scalars, strings as text, dictionaries of numbers as scalars of one chart."""
        for name, value in plain(values).items():
            if isinstance(value, (int, float)):
                self.writer.add_scalar(name, value, global_step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.add_text(name, value, global_step=step, **kwargs)
            elif isinstance(value, dict):
                self.writer.add_scalars(name, dict(_numbers(value)), global_step=step, **kwargs)
            else:
                logger.warning_once(
                    f"TensorBoard keeps numbers and text: `{name}`, a {type(value).__name__}, is left out."
                )
        self.writer.flush()

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """
        Keep pictures by name: an array or tensor of shape (N, C, H, W), or as in `dataformats`, or a list of pictures.

        A list holds arrays of equal shapes, or PIL's images, which come with their channels last.
        """
        for name, images in values.items():
            batch, form = images, {}
            if isinstance(images, (list, tuple)):
                are_arrays = all(hasattr(image, "shape") for image in images)
                batch = np.stack([np.asarray(image if are_arrays else image.convert("RGB")) for image in images])
                form = {} if are_arrays else {"dataformats": "NHWC"}
            self.writer.add_images(name, batch, global_step=step, **{**form, **kwargs})

    def finish(self) -> None:
        self.writer.close()


def _numbers(values: dict[str, Any]) -> Any:
    for name, value in flat(values):
        if isinstance(value, (int, float)):
            yield name, value
        else:
            logger.warning_once(
                f"TensorBoard draws numbers: `{name}`, a {type(value).__name__}, is left out of its chart."
            )

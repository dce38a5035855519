"""Aim."""

import os
from typing import Any, ClassVar

from accelerate_nb.runtime.compat.packages import is_aim_available
from accelerate_nb.runtime.trackers.base import PackageTracker, all_on_main_process, flat, plain, settings


@all_on_main_process
class AimTracker(PackageTracker):
    """
    A run called `run_name` in the repository at `logging_dir`; further arguments go to `aim.Run`.

    Aim 4 has another interface and doesn't count as installed. The run is also the attribute `writer`.
    """

    name: ClassVar[str] = "aim"
    requires_logging_directory: ClassVar[bool] = True
    _is_available = staticmethod(is_aim_available)

    writer: Any

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] | None = ".", **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.aim_repo_path = logging_dir

    def start(self) -> None:
        from aim import Run

        self.writer = Run(repo=self.aim_repo_path, **self.init_kwargs)
        self.writer.name = self.run_name

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the settings as the run's `hparams`."""
        self.writer["hparams"] = settings(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep numbers, strings and Aim's own media; names in dictionaries are joined by a slash."""
        from aim import Text

        for name, value in flat(plain(values)):
            self.writer.track(Text(value) if isinstance(value, str) else value, name=name, step=step, **kwargs)

    def log_images(
        self, values: dict[str, Any], step: int | None = None, kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """
        Keep pictures (arrays or PIL's images) by name, or pairs of a picture and its caption.

        `kwargs["aim_image"]` goes to `aim.Image`, `kwargs["track"]` to `Run.track`.
        """
        from aim import Image

        of_image, of_track = ((kwargs or {}).get(item, {}) for item in ("aim_image", "track"))
        for name, value in values.items():
            picture, caption = value if isinstance(value, tuple) else (value, "")
            self.writer.track(Image(picture, caption=caption, **of_image), name=name, step=step, **of_track)

    def finish(self) -> None:
        self.writer.close()

"""Comet."""

from typing import Any, ClassVar

from accelerate_nb.runtime.compat.packages import is_comet_ml_available, is_installed
from accelerate_nb.runtime.trackers.base import PackageTracker, all_on_main_process, logger, plain, settings


@all_on_main_process
class CometMLTracker(PackageTracker):
    """
    An experiment of the project `run_name`; further arguments go to `comet_ml.start`.

    Before comet_ml 3.41, which has no `start`, they go to `comet_ml.Experiment`. The experiment is also the attribute `writer`.
    """

    name: ClassVar[str] = "comet_ml"
    _is_available = staticmethod(is_comet_ml_available)

    writer: Any

    def start(self) -> None:
        import comet_ml

        begin = comet_ml.start if is_installed("comet_ml", at_least="3.41.0") else comet_ml.Experiment
        self.writer = begin(project_name=self.run_name, **self.init_kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the settings as the experiment's parameters."""
        self.writer.log_parameters(settings(values))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep numbers as metrics, also those in dictionaries, and strings as "other"."""
        if step is not None:
            self.writer.set_step(step)
        for name, value in plain(values).items():
            if isinstance(value, (int, float)):
                self.writer.log_metric(name, value, step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.log_other(name, value, **kwargs)
            elif isinstance(value, dict):
                self.writer.log_metrics(value, step=step, **kwargs)
            else:
                logger.warning_once(f"Comet keeps numbers and text: `{name}`, a {type(value).__name__}, is left out.")

    def finish(self) -> None:
        self.writer.end()

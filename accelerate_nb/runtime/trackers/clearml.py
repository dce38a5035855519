"""ClearML."""

import os
from typing import Any, ClassVar

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.compat.packages import is_clearml_available
from accelerate_nb.runtime.trackers.base import PackageTracker, all_on_main_process, logger, plain, settings


@all_on_main_process
class ClearMLTracker(PackageTracker):
    """
    A task, the current one where the user has begun one, else one that is called `run_name`.

    Further arguments go to `Task.init`; the variables `CLEARML_PROJECT` and `CLEARML_TASK` go before `run_name`. The task is
    also the attribute `task`.
    """

    name: ClassVar[str] = "clearml"
    _is_available = staticmethod(is_clearml_available)
    _kept_as: ClassVar[str] = "task"

    task: Any

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.user_provided_run_name = run_name
        self._initialized_externally = False

    def start(self) -> None:
        from clearml import Task

        current = Task.current_task()
        self._initialized_externally = bool(current)
        names = {
            "project_name": os.environ.get("CLEARML_PROJECT", self.user_provided_run_name),
            "task_name": os.environ.get("CLEARML_TASK", self.user_provided_run_name),
        }
        self.task = current or Task.init(**{**names, **self.init_kwargs})

    def store_init_configuration(self, values: dict[str, Any]) -> Any:
        """Connect the settings to the task; gives what ClearML makes of them."""
        return self.task.connect_configuration(settings(values))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """
        Keep numbers: with a step in a chart, without one as a single value; others are left out, with a warning.

        `train_loss`, `eval_loss` and `test_loss` are series of one chart `loss`; what has none of these beginnings is of the
        series `train`.
        """
        clearml_logger = self.task.get_logger()
        for name, value in plain(values).items():
            if not isinstance(value, (int, float)):
                logger.warning_once(f"ClearML keeps numbers: `{name}`, a {type(value).__name__}, is left out.")
            elif step is None:
                clearml_logger.report_single_value(name=name, value=value, **kwargs)
            else:
                title, series = self._get_title_series(name)
                clearml_logger.report_scalar(title=title, series=series, value=value, iteration=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep pictures (arrays or PIL's images) by name."""
        for name, image in values.items():
            title, series = self._get_title_series(name)
            self.task.get_logger().report_image(title=title, series=series, iteration=step, image=image, **kwargs)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Keep a table, given as a `dataframe` or as rows of `data`, whose first is the header where there are no `columns`."""
        if dataframe is None and data is None:
            raise ConfigurationError(
                f"The table {table_name!r} was given neither `data` nor `dataframe`. Give one of them."
            )
        rows = dataframe if dataframe is not None else [columns, *(data or [])] if columns else data
        title, series = self._get_title_series(table_name)
        self.task.get_logger().report_table(title=title, series=series, table_plot=rows, iteration=step, **kwargs)

    def finish(self) -> None:
        """End the task, unless the user has begun it."""
        if not self._initialized_externally:
            self.task.close()

    @staticmethod
    def _get_title_series(name: str) -> tuple[str, str]:
        series, _, title = name.partition("_")
        return (title, series) if title and series in {"eval", "test", "train"} else (name, "train")

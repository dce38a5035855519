"""MLflow."""

import json
import os
from itertools import islice
from typing import Any, ClassVar

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.compat.packages import is_mlflow_available
from accelerate_nb.runtime.trackers.base import PackageTracker, all_on_main_process, logger, plain

_BOOLEANS = {
    **dict.fromkeys(("y", "yes", "t", "true", "on", "1"), True),
    **dict.fromkeys(("n", "no", "f", "false", "off", "0"), False),
}


def _mlflow() -> Any:
    """The package, which is loaded at its first use."""
    import mlflow

    return mlflow


@all_on_main_process
class MLflowTracker(PackageTracker):
    """
    A run of an experiment, kept at `MLFLOW_TRACKING_URI`.

    `logging_dir` is where a new experiment keeps its artifacts; `run_id` continues a run, otherwise a new one is called
    `run_name`; `tags` are a dictionary or its JSON. The variables `MLFLOW_EXPERIMENT_NAME`, `MLFLOW_RUN_ID`, `MLFLOW_TAGS` and
    `MLFLOW_NESTED_RUN` go before the arguments. The run is also the attribute `active_run`.
    """

    name: ClassVar[str] = "mlflow"
    _is_available = staticmethod(is_mlflow_available)
    _kept_as: ClassVar[str] = "active_run"

    active_run: Any

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        tags: dict[str, Any] | str | None = None,
        nested_run: bool | str = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        super().__init__(run_name)
        tags = os.environ.get("MLFLOW_TAGS", tags)
        nested_run = os.environ.get("MLFLOW_NESTED_RUN", nested_run)
        self.experiment_name = os.environ.get("MLFLOW_EXPERIMENT_NAME", experiment_name)
        self.logging_dir = logging_dir
        self.run_id = os.environ.get("MLFLOW_RUN_ID", run_id)
        self.tags = json.loads(tags) if isinstance(tags, str) else tags
        if isinstance(nested_run, str) and nested_run.lower() not in _BOOLEANS:
            raise ConfigurationError(f"MLFLOW_NESTED_RUN is {nested_run!r}. Set it to one of {', '.join(_BOOLEANS)}.")
        self.nested_run = _BOOLEANS[nested_run.lower()] if isinstance(nested_run, str) else nested_run
        self.description = description

    def start(self) -> None:
        experiment = None  # the one that is set in mlflow, or its default
        if self.experiment_name is not None:
            location = None if self.logging_dir is None else os.fspath(self.logging_dir)
            found = _mlflow().get_experiment_by_name(self.experiment_name)
            experiment = found.experiment_id if found is not None else None
            experiment = experiment or _mlflow().create_experiment(self.experiment_name, location, self.tags)
        self.active_run = _mlflow().start_run(
            run_id=self.run_id,
            experiment_id=experiment,
            run_name=self.run_name,
            nested=self.nested_run,
            tags=self.tags,
            description=self.description,
        )

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the settings as the run's parameters; texts that are too long for MLflow are left out, with a warning."""
        from mlflow.utils import validation

        longest, most = validation.MAX_PARAM_VAL_LENGTH, validation.MAX_PARAMS_TAGS_PER_BATCH
        kept = {}
        for name, value in plain(values).items():
            if len(str(value)) <= longest:
                kept[name] = value
            else:
                logger.warning_once(
                    f"MLflow keeps parameters of at most {longest} characters: `{name}` has {len(str(value))}, and is left out."
                )
        remaining = iter(kept.items())
        while batch := dict(islice(remaining, most)):
            _mlflow().log_params(batch)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep numbers as metrics; others are left out, with a warning."""
        metrics = {}
        for name, value in plain(values).items():
            if isinstance(value, (int, float)):
                metrics[name] = value
            else:
                logger.warning_once(f"MLflow keeps numbers: `{name}`, a {type(value).__name__}, is left out.")
        _mlflow().log_metrics(metrics, step=step, **kwargs)

    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Keep a figure of matplotlib or plotly as the artifact `artifact_file`."""
        _mlflow().log_figure(figure=figure, artifact_file=artifact_file, **save_kwargs)

    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Keep the files of a folder, under `artifact_path` where one is given."""
        _mlflow().log_artifacts(local_dir=local_dir, artifact_path=artifact_path)

    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Keep a file, under `artifact_path` where one is given."""
        _mlflow().log_artifact(local_path=local_path, artifact_path=artifact_path)

    def finish(self) -> None:
        _mlflow().end_run()

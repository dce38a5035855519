"""Weights & Biases."""

from typing import Any, ClassVar

from accelerate_nb.runtime.compat.packages import is_wandb_available
from accelerate_nb.runtime.trackers.base import RunTracker, all_on_main_process


@all_on_main_process
class WandBTracker(RunTracker):
    """A run of the project `run_name`; further arguments go to `wandb.init`. The run is also the attribute `run`."""

    name: ClassVar[str] = "wandb"
    _is_available = staticmethod(is_wandb_available)

    def start(self) -> None:
        import wandb

        self.run = wandb.init(project=self.run_name, **self.init_kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the settings as the run's config; what is there under the same names is replaced."""
        self.run.config.update(values, allow_val_change=True)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep lists of pictures (arrays, tensors or PIL's images) by name."""
        import wandb

        for name, images in values.items():
            self.log({name: [wandb.Image(image) for image in images]}, step=step, **kwargs)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Keep a table, given by `columns` and rows of `data`, or as a `dataframe`."""
        import wandb

        named: list[str | int] | None = None if columns is None else [*columns]  # wandb's type, of which ours is a part
        self.log({table_name: wandb.Table(columns=named, data=data, dataframe=dataframe)}, step=step, **kwargs)

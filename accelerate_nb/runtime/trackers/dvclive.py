"""DVCLive."""

from typing import Any, ClassVar

from accelerate_nb.runtime.compat.packages import is_dvclive_available
from accelerate_nb.runtime.trackers.base import PackageTracker, all_on_main_process, logger, plain, settings


@all_on_main_process
class DVCLiveTracker(PackageTracker):
    """
    A `dvclive.Live`, the given one or one made with `kwargs`; it is also the attribute `live`.

    `run_name` is not used by DVCLive: the folder is `init_kwargs={"dvclive": {"dir": ...}}`.
    """

    name: ClassVar[str] = "dvclive"
    _is_available = staticmethod(is_dvclive_available)
    _kept_as: ClassVar[str] = "live"

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.live = live

    def start(self) -> None:
        from dvclive import Live

        self.live = Live(**self.init_kwargs) if self.live is None else self.live

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the settings in `params.yaml`."""
        self.live.log_params(settings(values))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep numbers and strings, then go on to the next step; others are left out, with a warning."""
        if step is not None:
            self.live.step = step
        for name, value in plain(values).items():
            if isinstance(value, (int, float, str)):
                self.live.log_metric(name, value, **kwargs)
            else:
                logger.warning_once(f"DVCLive keeps numbers and text: `{name}`, a {type(value).__name__}, is left out.")
        self.live.next_step()

    def finish(self) -> None:
        self.live.end()

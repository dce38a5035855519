"""The hooks that bring to the notebook what code logs by other libraries: `Trainer`, Lightning, TensorBoard, wandb."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from accelerate_nb.rank import metric_log
from accelerate_nb.rank.import_hook import after_import


class _Logged(NamedTuple):
    values: Mapping[str, Any]
    step: int | None


def install() -> None:
    """
    Send what is logged by these libraries as metrics, unless `autolog` is off; nothing is imported here.

    A log that calls another one (`Trainer` logs to TensorBoard, say) is reported once, by the names of the outermost.
    """
    if not metric_log.is_on():
        return
    for module, owner, method, logged in _LOGS:
        after_import(module, functools.partial(_report_calls, owner=owner, method=method, logged=logged))


def _report_calls(module: Any, owner: str, method: str, logged: Callable[..., _Logged]) -> None:
    # a version of the library that has no such method logs otherwise, and is left alone
    owner_class = getattr(module, owner, None)
    original = getattr(owner_class, method, None)
    if original is None:
        return

    @functools.wraps(original)
    def reporting(self: Any, *args: Any, **kwargs: Any) -> Any:
        with metric_log.log_call() as is_outermost:
            value = original(self, *args, **kwargs)
        if is_outermost:
            metric_log.report_logged(*logged(self, *args, **kwargs))
        return value

    setattr(owner_class, method, reporting)


def _of_trainer(trainer: Any, logs: Mapping[str, Any], *_: Any, **__: Any) -> _Logged:
    return _Logged({"epoch": trainer.state.epoch, **logs}, trainer.state.global_step)


def _of_lightning(connector: Any, metrics: Mapping[str, Any], step: int | None = None, *_: Any, **__: Any) -> _Logged:
    return _Logged(metrics, connector.trainer.global_step if step is None else step)


def _of_summary_writer(
    _writer: Any, tag: str, scalar_value: Any, global_step: int | None = None, *_: Any, **__: Any
) -> _Logged:
    return _Logged({tag: scalar_value}, global_step)


def _of_wandb(run: Any, data: Mapping[str, Any], step: int | None = None, *_: Any, **__: Any) -> _Logged:
    return _Logged(data, getattr(run, "step", None) if step is None else step)


_CONNECTOR = "trainer.connectors.logger_connector.logger_connector"
# The module, class and method of each log, and what its arguments mean.
_LOGS: tuple[tuple[str, str, str, Callable[..., _Logged]], ...] = (
    ("transformers.trainer", "Trainer", "log", _of_trainer),
    (f"lightning.pytorch.{_CONNECTOR}", "_LoggerConnector", "log_metrics", _of_lightning),
    (f"pytorch_lightning.{_CONNECTOR}", "_LoggerConnector", "log_metrics", _of_lightning),
    ("torch.utils.tensorboard.writer", "SummaryWriter", "add_scalar", _of_summary_writer),
    ("wandb.sdk.wandb_run", "Run", "log", _of_wandb),
)

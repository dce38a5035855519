"""The hooks that bring to the notebook what code logs by other libraries, and the steps that it makes on Hugging Face's own Accelerate."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from accelerate_nb.rank import event_sink
from accelerate_nb.rank.import_hook import after_import

# A call's arguments by their names; the values that it logs and their step.
_Call: TypeAlias = Mapping[str, Any]
_Logged: TypeAlias = tuple[Mapping[str, Any], "int | None"]
_Reader: TypeAlias = Callable[[Any, _Call], _Logged]


def install() -> None:
    """Send what is logged by these libraries as metrics, unless `autolog` is off; nothing is imported here."""
    # a log that calls another one (`Trainer` logs to TensorBoard, say) is reported once, by the names of the outermost
    if not event_sink.is_on():
        return
    for module in dict.fromkeys(entry[0] for entry in _LOGS):
        after_import(module, _report_calls_of)
    after_import("accelerate.accelerator", _measure_steps_of)


def _measure_steps_of(module: Any) -> None:
    accelerator_class: Any = getattr(module, "Accelerator", None)
    if getattr(accelerator_class, "__module__", None) != module.__name__:
        # another package stands under this name, such as this one
        return
    original = accelerator_class.__init__
    measured: list[Any] = []

    @functools.wraps(original)
    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if not measured:
            from accelerate_nb.runtime.observability.hf_accelerate import AccelerateSteps

            measured.append(AccelerateSteps())
        measured[0].measure(self)

    accelerator_class.__init__ = begin


def _report_calls_of(module: Any) -> None:
    for _, owner, method, logged in [entry for entry in _LOGS if entry[0] == module.__name__]:
        # a version of the library that has no such method logs otherwise, and is left alone
        owner_class = getattr(module, owner, None)
        if (original := getattr(owner_class, method, None)) is not None:
            setattr(owner_class, method, _reporting(original, logged))


def _reporting(original: Callable[..., Any], logged: _Reader) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def reporting(self: Any, *args: Any, **kwargs: Any) -> Any:
        with event_sink.log_call() as is_outermost:
            value = original(self, *args, **kwargs)
        if is_outermost:
            event_sink.report_logged(*logged(self, signature.bind(self, *args, **kwargs).arguments))
        return value

    return reporting


# Each reads a call's arguments by the names of the library's parameters. An argument that another version names otherwise is missing.


def _of_trainer(trainer: Any, call: _Call) -> _Logged:
    """The names are those that the callbacks of transformers give to TensorBoard and others: `train/loss`, `eval/loss`."""
    logs = {"epoch": trainer.state.epoch}
    for name, value in call.get("logs", {}).items():
        group, _, rest = name.partition("_")
        logs[f"{group}/{rest}" if group in {"eval", "test"} else name if name == "epoch" else f"train/{name}"] = value
    return logs, trainer.state.global_step


def _of_lightning(connector: Any, call: _Call) -> _Logged:
    step = call.get("step")
    return call.get("metrics", {}), connector.trainer.global_step if step is None else step


def _of_wandb(run: Any, call: _Call) -> _Logged:
    step = call.get("step")
    return call.get("data", {}), getattr(run, "step", None) if step is None else step


def _of_mlflow_batch(_client: Any, call: _Call) -> _Logged:
    metrics = call.get("metrics", ())
    return {metric.key: metric.value for metric in metrics}, (metrics[0].step or None) if metrics else None


def _of_comet(experiment: Any, call: _Call) -> _Logged:
    step, prefix = call.get("step"), f"{call['prefix']}_" if call.get("prefix") else ""
    values = call.get("dic", {call.get("name"): call.get("value")})
    named = {f"{prefix}{name}": value for name, value in values.items()}
    return named, experiment.curr_step if step is None else step


def _of_aim(_run: Any, call: _Call) -> _Logged:
    value = call.get("value")
    return value if isinstance(value, Mapping) else {str(call.get("name")): value}, call.get("step")


def _of_clearml(_logger: Any, call: _Call) -> _Logged:
    title, series = call.get("title"), call.get("series")
    return {str(title if title == series else f"{title}/{series}"): call.get("value")}, call.get("iteration")


def _of_dictionary(_run: Any, call: _Call) -> _Logged:
    return call.get("metrics", call.get("data", {})), call.get("step")


_CONNECTOR = "trainer.connectors.logger_connector.logger_connector"
# The module, class and method of each log, and what reads its calls.
_LOGS: tuple[tuple[str, str, str, _Reader], ...] = (
    ("transformers.trainer", "Trainer", "log", _of_trainer),
    (f"lightning.pytorch.{_CONNECTOR}", "_LoggerConnector", "log_metrics", _of_lightning),
    (f"pytorch_lightning.{_CONNECTOR}", "_LoggerConnector", "log_metrics", _of_lightning),
    (
        "torch.utils.tensorboard.writer",
        "SummaryWriter",
        "add_scalar",
        lambda _, call: ({str(call.get("tag")): call.get("scalar_value")}, call.get("global_step")),
    ),
    ("wandb.sdk.wandb_run", "Run", "log", _of_wandb),
    (
        "mlflow.tracking.client",
        "MlflowClient",
        "log_metric",
        # the functions of the module say 0 where no step was given
        lambda _, call: ({str(call.get("key")): call.get("value")}, call.get("step") or None),
    ),
    ("mlflow.tracking.client", "MlflowClient", "log_batch", _of_mlflow_batch),
    ("comet_ml.experiment", "CometExperiment", "log_metric", _of_comet),
    ("comet_ml.experiment", "CometExperiment", "log_metrics", _of_comet),
    ("aim.sdk.run", "BasicRun", "track", _of_aim),
    ("clearml.logger", "Logger", "report_scalar", _of_clearml),
    ("dvclive.live", "Live", "log_metric", lambda live, call: ({str(call.get("name")): call.get("val")}, live.step)),
    ("trackio.run", "Run", "log", _of_dictionary),
    ("swanlab.data.run.main", "SwanLabRun", "log", _of_dictionary),
    ("swanlab.sdk.internal.run", "Run", "log", _of_dictionary),
)

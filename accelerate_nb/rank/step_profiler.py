"""A rank's optimizer steps as an observer sees them: the first one, and the profile of the next ones by torch's profiler."""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate_nb.config.environment import runs_folder
from accelerate_nb.events.event_types import FirstStep, ProfiledOperation, StepProfile
from accelerate_nb.rank import background_tasks
from accelerate_nb.rank.event_sink import emit, outlet
from accelerate_nb.rank.import_hook import after_import

MOST_OPERATIONS = 10
_LONGEST_NAME = 200
# A first step, and a further one where the others are short, that takes longer is none: an evaluation would fill the memory with its calls.
_FIRST_STEP_LIMIT, _STEP_LIMIT, _TIMES_LONGEST = 120.0, 10.0, 5.0
# The end of a function waits so long for the trace; whoever interrupts it waits for its failure meanwhile.
_EXPORT_TIMEOUT = 3.0
_BETWEEN_CHECKS = 1.0
_NO_STEP = "no optimizer step was seen before its function ended"


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """A request to profile a rank's next steps; `folder` is that of the run, on the machine that launched it."""

    rank: int
    number: int
    steps: int
    folder: str

    def without_profile(self, problem: str) -> StepProfile:
        return StepProfile(self.rank, self.number, 0, 0.0, (), "", time.time(), problem)


@dataclass(slots=True)
class _Recording:
    """A profile that goes on, of the steps of one optimizer."""

    request: ProfileRequest
    profiler: Any
    optimizer: Any
    began: float
    stepped: float
    steps: int = 0
    longest: float = 0.0
    over: threading.Event = field(default_factory=threading.Event)

    def is_late(self) -> bool:
        limit = max(_STEP_LIMIT, _TIMES_LONGEST * self.longest) if self.steps else _FIRST_STEP_LIMIT
        return time.monotonic() > self.stepped + limit


class StepProfiler:
    """Profiles a rank's steps, between the thread that receives the request and the one that trains."""

    # It begins after a step of whichever optimizer makes the next one, and ends after so many more of the same. Ranks
    # need not agree on a step, as they do for a knob.

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._request: ProfileRequest | None = None
        self._recording: _Recording | None = None
        self._export: threading.Thread | None = None
        self._is_over = False
        self._is_first_step_reported = False

    # --------------------------------------------------------------------------------------------- the thread that receives

    def request(self, request: ProfileRequest) -> None:
        """Profile the next steps, and send a `StepProfile` in any case."""
        with self._lock:
            if not self._is_over:
                self._request = request
                return
        emit(request.without_profile("its function has ended"))

    # ------------------------------------------------------------------------------------------------- the thread that trains

    def report_first_step(self) -> None:
        """Send the event of the first step, once a rank; called after every step."""
        if self._is_first_step_reported:
            return
        self._is_first_step_reported = True
        if (listener := outlet()) is not None:
            emit(FirstStep(listener.rank, time.time()))

    def stepped(self, optimizer: Any) -> None:
        """Note a step of an optimizer: a profile may begin or end here."""
        recording = self._recording
        if recording is None:
            if self._request is not None:
                self._begin(optimizer)
        elif recording.optimizer is optimizer:
            now = time.monotonic()
            recording.longest = max(recording.longest, now - recording.stepped)
            recording.steps, recording.stepped = recording.steps + 1, now
            if recording.steps >= recording.request.steps:
                self._finish(recording)

    def begin_function(self) -> None:
        """Take requests from now on; another function begins."""
        self._is_over = False

    def end_function(self) -> None:
        """Finish the profile with the steps made so far, since the function has ended, and wait a moment for its trace."""
        with self._lock:
            self._is_over = True
            request, self._request = self._request, None
        if request is not None:
            emit(request.without_profile(_NO_STEP))
        if self._recording is not None:
            self._finish(self._recording)
        if self._export is not None:
            self._export.join(_EXPORT_TIMEOUT)

    def _begin(self, optimizer: Any) -> None:
        with self._lock:
            request, self._request = self._request, None
        if request is None:
            return
        if obstacle := _obstacle():
            emit(request.without_profile(obstacle))
            return
        import torch
        from torch.profiler import ProfilerActivity, profile

        devices = {"CUDA": torch.cuda, "XPU": torch.xpu}
        used = [getattr(ProfilerActivity, name) for name, module in devices.items() if module.is_initialized()]
        profiler = profile(activities=[ProfilerActivity.CPU, *used])
        profiler.start()
        now = time.monotonic()
        self._recording = recording = _Recording(request, profiler, optimizer, now, now)
        threading.Thread(target=self._watch, args=(recording,), name="accelerate_nb profile", daemon=True).start()

    def _finish(self, recording: _Recording) -> None:
        self._recording = None
        recording.over.set()
        seconds = time.monotonic() - recording.began
        recording.profiler.stop()
        if not recording.steps:
            emit(recording.request.without_profile("no whole optimizer step was seen before the profile had to end"))
            return
        if self._export is not None:
            background_tasks.forget(self._export.join)
        self._export = threading.Thread(
            target=_export, args=(recording, seconds), name="accelerate_nb profile", daemon=True
        )
        self._export.start()
        background_tasks.register(self._export.join)

    # ----------------------------------------------------------------------------------------------- the thread that watches

    def _watch(self, recording: _Recording) -> None:
        while not recording.over.wait(_BETWEEN_CHECKS):
            if recording.is_late():
                # only the thread that began a profile can end it
                ctypes.pythonapi.Py_AddPendingCall(_FINISH_LATE, None)


_profiler = StepProfiler()


def current_step_profiler() -> StepProfiler:
    """The profiler of this rank's steps."""
    return _profiler


def _finish_late(_: object) -> int:
    if (recording := _profiler._recording) is not None and recording.is_late():
        _profiler._finish(recording)
    return 0


# Python calls it in the main thread, at any time after it was added: it lasts as long as the process.
_FINISH_LATE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_finish_late)


def costliest(averages: Sequence[Any]) -> tuple[ProfiledOperation, ...]:
    """The operations that took the most time, on the device where one was used; `averages` in microseconds."""
    operations = [item for item in averages if _type_of(item.device_type) == "cpu"]
    kernels = [item for item in averages if _type_of(item.device_type) != "cpu" and item.self_device_time_total > 0]
    device = _type_of(kernels[0].device_type) if kernels else "cpu"
    times = [item.self_device_time_total if kernels else item.self_cpu_time_total for item in operations]
    total = sum(times) or 1.0
    ranked = sorted(zip(times, operations, strict=True), key=lambda pair: -pair[0])[:MOST_OPERATIONS]
    return tuple(
        ProfiledOperation(item.key[:_LONGEST_NAME], item.count, time / 1e6, time / total, device)
        for time, item in ranked
        if time > 0
    )


def _type_of(device_type: Any) -> str:
    return str(device_type.name).lower()


def _obstacle() -> str:
    """The reason why there can be no profile; empty where there can."""
    import torch.profiler

    if "torch_xla" in sys.modules:
        return "torch's profiler sees nothing of an XLA device"
    if not torch.profiler.kineto_available():
        return "this torch was built without Kineto, which makes traces"
    if torch.autograd._profiler_enabled():
        return "the training runs a profiler of its own at this moment"
    if threading.current_thread() is not threading.main_thread():
        return "its steps are made in another thread than the main one"
    return ""


def _export(recording: _Recording, seconds: float) -> None:
    """Send what a profile saw, and write its trace, whose file is complete when its event comes."""
    request, trace = recording.request, ""
    with suppress(OSError, RuntimeError):
        # a full disk costs the trace
        folder = Path(request.folder)
        if not folder.is_dir():
            # the run was launched on another machine
            folder = runs_folder(os.environ) / "nodes" / folder.name
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = folder / f"profile_{request.number}_rank_{request.rank}.json.gz"
        recording.profiler.export_chrome_trace(str(path))
        trace = str(path)
    operations = costliest(recording.profiler.key_averages())
    emit(StepProfile(request.rank, request.number, recording.steps, seconds, operations, trace, time.time()))


def watch_steps() -> None:
    """Have any optimizer of torch report its steps in this process, also where no `Accelerator` is used."""

    def on_step(optimizer: Any, *_: Any) -> None:
        import torch

        # a step that is being traced is none, and to send anything would break its graph
        if not torch.compiler.is_compiling():
            _profiler.report_first_step()
            _profiler.stepped(optimizer)

    after_import("torch.optim.optimizer", lambda module: module.register_optimizer_step_post_hook(on_step))

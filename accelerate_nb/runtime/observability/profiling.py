"""The time and memory of a step: torch's profiler, one trace a process."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.profiler import ProfilerActivity, profile, schedule

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.compat.dataclasses import KwargsHandler
from accelerate_nb.runtime.world.world import World
from accelerate_nb.runtime.xla.device import traced as device_trace


@dataclass
class ProfileKwargs(KwargsHandler):
    """
    Arguments for `torch.profiler.profile`.

    `activities` are names of what is watched ("cpu", "cuda", "xpu", "mtia", "hpu", as far as this torch knows them; all that
    the device has by default), `schedule_option` the arguments of `torch.profiler.schedule`. With `output_trace_dir` each
    process writes a Chrome trace there, `profile_<rank>.json`; torch's profiler sees nothing of an XLA device, so what
    torch_xla's own sees of it goes to `xla_<rank>` there, which TensorBoard's profile plugin shows.
    """

    activities: list[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def build(self) -> profile:
        """The profiler that these arguments describe; it has not begun."""
        known: dict[str, ProfilerActivity] = {
            name.lower(): activity for name, activity in ProfilerActivity.__members__.items() if name != "PrivateUse1"
        }
        for name in self.activities or ():
            if name not in known:
                raise ConfigurationError(
                    f"Invalid profiler activity: {name!r}. This torch knows {', '.join(map(repr, sorted(known)))}."
                )
        return profile(
            activities=None if self.activities is None else [known[name] for name in self.activities],
            schedule=None if self.schedule_option is None else schedule(**self.schedule_option),
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )


@contextmanager
def profiled(how: ProfileKwargs, world: World) -> Iterator[profile]:
    """A block that is profiled; where traces are written, all processes leave it together."""
    if how.output_trace_dir is None:
        with how.build() as profiler:
            yield profiler
        return
    with device_trace(os.path.join(how.output_trace_dir, f"xla_{world.rank}")), how.build() as profiler:
        yield profiler
    os.makedirs(how.output_trace_dir, exist_ok=True)
    profiler.export_chrome_trace(os.path.join(how.output_trace_dir, f"profile_{world.rank}.json"))
    world.barrier()

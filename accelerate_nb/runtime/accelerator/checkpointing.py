"""Methods that write a training to files and read it back."""

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.utils.hooks import RemovableHandle

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.rank.step_hold import current_step_hold
from accelerate_nb.runtime.accelerator.step import StepMethods
from accelerate_nb.runtime.checkpoints import folders
from accelerate_nb.runtime.checkpoints.checkpoint import Checkpoint
from accelerate_nb.runtime.checkpoints.host_copy import complete
from accelerate_nb.runtime.checkpoints.saver import Saver
from accelerate_nb.runtime.checkpoints.writer import FileToWrite, save_model_files
from accelerate_nb.runtime.compat.save import save


class CheckpointMethods(StepMethods):
    """The methods of an `Accelerator` that save and load files."""

    _saver: Saver
    _save_model_state_pre_hook: OrderedDict[int, Callable[..., None]]
    _load_model_state_pre_hook: OrderedDict[int, Callable[..., None]]

    @property
    def should_save_model(self) -> bool:
        """Whether this process writes a model's weights."""
        return self.world.is_local_main if self.project_configuration.save_on_each_node else self.world.is_main

    def get_state_dict(self, model: Any, unwrap: bool = True) -> dict[str, Any]:
        """The model's complete weights."""
        return self.strategy.model_state(model, unwrap=unwrap)

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write an object once: on the main process, or on the first of each machine with `save_on_each_node`."""
        save(obj, f, self.project_configuration.save_on_each_node, safe_serialization)

    def save_model(
        self,
        model: Any,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the model's weights to a folder, replacing those in it, in files of at most `max_shard_size`."""
        folder = Path(save_directory)
        if folder.is_file():
            raise ConfigurationError(f"Provided path ({folder}) should be a directory, not a file. Pass a folder.")
        with current_step_hold().saving():
            self.strategy.settle()
            state = complete(self.strategy.unwrap(model), self.get_state_dict(model))
            if self.should_save_model:
                save_model_files(state, folder, max_shard_size, safe=safe_serialization)

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        blocking: bool = True,
        **save_model_func_kwargs: Any,
    ) -> Path:
        """
        Write the whole training to a folder: models, optimizers, schedules, loaders' positions, random states, registered objects.

        All processes call it; when it returns, the folder is complete on the disk. A failure, or a kill at any moment, leaves
        what was there before. With `blocking=False` it returns when the state has been copied to host memory, and the folder
        appears when a thread has written it; `wait_for_checkpoint` waits for that, and so do the next `save_state`,
        `load_state` and `end_training`, which raise the `CheckpointError` of a write that failed. Other arguments go to the
        `save_checkpoint` of DeepSpeed's engine.

        >>> accelerator.save_state("checkpoints/newest", blocking=False)  # doctest: +SKIP
        """
        self.wait_for_checkpoint()
        paths = folders.paths_to_write(output_dir, self.project_configuration)
        checkpoint, hooks = self._checkpoint, tuple(self._save_model_state_pre_hook.values())
        in_window = not self.gradient_state.sync_gradients
        if checkpoint.writes:
            folders.note_save(paths.folder)

        def files(draft: Path, is_collective: bool) -> list[FileToWrite]:
            return checkpoint.files(
                draft,
                self.step,
                safe=safe_serialization,
                is_collective=is_collective,
                in_window=in_window,
                hooks=hooks,
                model_options=save_model_func_kwargs,
            )

        def after() -> None:
            if checkpoint.writes:
                folders.prune(self.project_configuration, paths.folder)

        with current_step_hold().saving():
            needs_all = not self.strategy.copies_are_whole
            self._saver.save(paths, files, after, needs_all=needs_all, blocking=blocking)
        self.project_configuration.iteration += 1
        return paths.folder

    def wait_for_checkpoint(self) -> Path | None:
        """
        Wait until what `save_state(..., blocking=False)` began is complete on the disk, and return its folder.

        `None` where nothing was being written. A write that failed is raised as `CheckpointError`, once, on every process.
        """
        with current_step_hold().saving():
            return self._saver.wait()

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        map_location: str | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """
        Read the whole training back from a folder that `save_state` wrote, here or with Accelerate; all processes call it.

        Without a folder, the newest complete one of those that are numbered. Files are read as data, never as code: where a
        registered object keeps more than plain values, `load_kwargs={"weights_only": False}` trusts the folder.
        A file that is missing, damaged or foreign is named in a `CheckpointError`.
        """
        self.wait_for_checkpoint()
        folder = folders.folder_to_read(input_dir, self.project_configuration, settles=self.world.is_local_main)
        step = self._checkpoint.load(
            folder,
            hooks=tuple(self._load_model_state_pre_hook.values()),
            map_location=map_location,
            load_options=load_kwargs,
            **load_model_func_kwargs,
        )
        if step is not None:
            self.step = step
        if self.project_configuration.automatic_checkpoint_naming and (number := folders.number_of(folder)) is not None:
            # the next save must not take a number that an older one has had, or it would be the first to be pruned
            self.project_configuration.iteration = max(self.project_configuration.iteration, number + 1)

    def resume(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        map_location: str | None = None,
        **load_model_func_kwargs: Any,
    ) -> bool:
        """
        Go on from the newest complete checkpoint, and return whether there was one; all processes call it, after `prepare`.

        Without a folder it is the newest one under `checkpoints/` of the project, where checkpoints are named automatically,
        whichever run saved it; else the newest one that this run has saved, before `max_restarts` started it again. A folder
        is a checkpoint's own, or one that holds checkpoints, and need not be there yet. A checkpoint that was not saved to its
        end is passed over. Raises `CheckpointError` where only some processes have one, and what `load_state` raises.

        >>> accelerator.resume()
        False
        """
        self.wait_for_checkpoint()
        project = self.project_configuration
        folder = folders.newest_checkpoint(input_dir, project, self.world)
        if folder is None:
            return False
        self.load_state(folder, load_kwargs, map_location, **load_model_func_kwargs)
        if project.automatic_checkpoint_naming and (last := folders.numbered(folders.numbered_in(project))[-1:]):
            # also of those that were passed over: a number is given once
            project.iteration = max(project.iteration, (folders.number_of(last[0]) or 0) + 1)
        return True

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Keep these objects in checkpoints too; each has a `state_dict` and a `load_state_dict`."""
        missing = [
            f"Item at index {index} ({type(object_).__name__})"
            for index, object_ in enumerate(objects)
            if not (hasattr(object_, "state_dict") and hasattr(object_, "load_state_dict"))
        ]
        if missing:
            raise ConfigurationError(
                "All `objects` must include a `state_dict` and `load_state_dict` function to be stored. "
                f"The following inputs are invalid: {', '.join(missing)}."
            )
        self.bundle.custom.extend(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, weights, folder)` before `save_state` writes weights; it may take some out of the list."""
        return _register(self._save_model_state_pre_hook, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, folder)` before `load_state` reads weights; it may take models out of the list."""
        return _register(self._load_model_state_pre_hook, hook)

    @property
    def _checkpoint(self) -> Checkpoint:
        on_each_node = self.project_configuration.save_on_each_node
        return Checkpoint(self.world, self.bundle, self.strategy, self.precision, on_each_node)


def _register(hooks: OrderedDict[int, Callable[..., None]], hook: Callable[..., None]) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle

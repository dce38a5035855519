"""Advice on known mistakes: one sentence for an exception's message, or for what a process wrote last."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from traceback import extract_tb

from accelerate_nb.failures.exception_copy import message_of
from accelerate_nb.failures.process_limits import limit_reached


@dataclass(frozen=True, slots=True)
class KnownMistake:
    """A mistake: the `pattern` of its error (class, colon, message) and of the `calls` that led to it, and what to do."""

    pattern: str
    todo: str
    calls: str = ""


# The messages are those of torch 2.9 to 2.15, of Python 3.10 to 3.13 and of this package. The first case that fits is taken.
_CASES = (
    KnownMistake(
        r"Expected all tensors to be on the same device|is not on the expected device|should be the same.*cuda",
        "Give model and loader to accelerator.prepare(...) and use what it returns; what you make yourself goes to "
        "accelerator.device.",
    ),
    KnownMistake(
        r"Torch not compiled with CUDA enabled|Found no NVIDIA driver|No CUDA GPUs are available",
        "Use accelerator.device in place of .cuda() and 'cuda': it is where this run computes.",
    ),
    KnownMistake(
        r"_scale is None|No inf checks were recorded",
        "Call accelerator.backward(loss) in place of loss.backward(): in fp16 it scales the loss for the step.",
    ),
    KnownMistake(
        r"does not require grad and does not have a grad_fn",
        "The loss depends on nothing that learns: look for no_grad(), .detach(), .item() or frozen weights on its way.",
    ),
    KnownMistake(
        r"TPU is already in use by|open\(/dev/(accel|vfio/?)\d+\): (Device or resource busy|Operation not permitted)",
        "Another process has the TPU's chips: the kernel of another notebook, which a restart ends, or one that was just killed "
        "and lets go within half a minute. sudo fuser /dev/accel* /dev/vfio/* names it.",
    ),
    KnownMistake(
        r"Runtime is already initialized",
        "The function begins torch_xla anew, which a worker has begun already: leave out xmp.spawn, torch_xla.launch and "
        "notebook_launcher in it.",
    ),
    KnownMistake(
        r"Expected \d+ worker addresses, got \d+|[Cc]ould not find SliceBuilder port",
        "The environment names a TPU whose processes are elsewhere: unset TPU_PROCESS_ADDRESSES, TPU_WORKER_HOSTNAMES and "
        "CLOUD_TPU_TASK_ID before the launch.",
    ),
    KnownMistake(
        r"TPU initialization failed|libtpu not found|Failed to get TPU metadata",
        "torch_xla found no TPU that it could begin: restart the notebook's machine, and see that libtpu fits: "
        "pip install 'torch_xla[tpu]'.",
    ),
    KnownMistake(
        r"RESOURCE_EXHAUSTED.*(hbm|HBM|vmem|memory)|Ran out of memory in memory space hbm",
        "The TPU's memory is full: take a smaller batch and gradient_accumulation_steps=..., or mixed_precision='bf16'.",
    ),
    KnownMistake(
        r"OutOfMemoryError|CUDA out of memory|CUBLAS_STATUS_ALLOC_FAILED",
        "Take a smaller batch and gradient_accumulation_steps=..., or mixed_precision='bf16'; find_executable_batch_size "
        "looks for the largest batch that fits. What a cell of the notebook holds on the GPU is freed by del and "
        "torch.cuda.empty_cache().",
    ),
    KnownMistake(
        r"DefaultCPUAllocator: can't allocate memory|DefaultCPUAllocator: not enough memory|^MemoryError",
        "The machine's memory is full: take fewer processes, a smaller batch, or less data at once.",
    ),
    KnownMistake(
        r"device-side assert triggered",
        "Mostly a label or an index is out of its range. Run once with cpu=True, which names the line, or with "
        "CUDA_LAUNCH_BLOCKING=1.",
    ),
    KnownMistake(
        r"Cannot re-initialize (CUDA|XPU) in forked subprocess",
        "A data loader's worker touched the GPU: let the data set give CPU tensors, which the prepared loader moves.",
        calls=r"dataloader\.py|worker\.py _worker_loop",
    ),
    KnownMistake(
        r"Cannot re-initialize (CUDA|XPU) in forked subprocess",
        "The notebook has used the GPU already: leave start_method out, so that workers come from a process that has not.",
    ),
    KnownMistake(
        r"Can't (pickle|get) (local object|<function|<class)|Can't pickle",
        "The loader starts its workers anew, and sends them the data set and collate_fn: pass "
        "multiprocessing_context='fork' or num_workers=0, or define them in a module, without a lambda.",
        calls=r"dataloader\.py",
    ),
    KnownMistake(
        r"out of shared memory|unable to (allocate|write|open|resize|mmap).*(shared memory|/torch_|shm)|Bus error",
        "/dev/shm is too small for the loader's workers: pass num_workers=0, or give the container more (docker run --shm-size=8g).",
    ),
    KnownMistake(
        r"OSError: \[Errno 28\] No space left on device",
        "/dev/shm is full, which the loader's workers need: see `df /dev/shm`, pass num_workers=0, or give the container more (docker "
        "run --shm-size=8g).",
        calls=r"dataloader\.py|multiprocessing",
    ),
    KnownMistake(
        r"DataLoader worker .* (exited unexpectedly|is killed by signal)",
        "A loader's worker was ended, mostly since memory ran out, the machine's or that of /dev/shm: take fewer workers, or "
        "num_workers=0 to see what it does. A container gets a larger /dev/shm by docker run --shm-size=8g.",
    ),
    KnownMistake(
        r"stack expects each tensor to be equal size",
        "The samples of a batch have different shapes: pad them in the loader's collate_fn.",
        calls=r"collate\.py",
    ),
    KnownMistake(
        r"has no len\(\)",
        "An iterable data set does not know its length: count the batches yourself, or give its class a __len__.",
        calls=r"__len__",
    ),
    KnownMistake(
        r"Expected to have finished reduction.*not used in producing loss",
        "Some weights took no part in the loss: Accelerator(kwargs_handlers=[DistributedDataParallelKwargs("
        "find_unused_parameters=True)]), or freeze them with requires_grad_(False).",
    ),
    KnownMistake(
        r"Expected to mark a variable ready only once",
        "A weight got its gradient twice in one backward: with gradient checkpointing pass use_reentrant=False, otherwise "
        "call the prepared model once for each backward.",
    ),
    KnownMistake(
        r"AttributeError: 'DistributedDataParallel' object has no attribute",
        "The prepared model is wrapped: accelerator.unwrap_model(model) has the attributes of your own.",
    ),
    KnownMistake(
        r"Error\(s\) in loading state_dict.*module\.",
        "The weights' names have a wrapper's 'module.' in front: save and load accelerator.unwrap_model(model).",
    ),
    KnownMistake(
        r"calls that don't fit together|invalid tensor size at index|op\.preamble\.length <= op\.nbytes",
        "Where ranks have batches of different sizes, gather_for_metrics and pad_across_processes take them; "
        "join_uneven_inputs is for different numbers of batches.",
    ),
    KnownMistake(
        r"doesn't have NCCL built in",
        "This torch has no NCCL, which connects GPUs: let Accelerator() choose, pass cpu=True, or install torch with CUDA.",
    ),
    KnownMistake(
        r"Duplicate GPU detected",
        "Two ranks use one GPU: use accelerator.device, and at most as many processes as there are GPUs.",
    ),
    KnownMistake(
        r"NCCL error|nccl(System|UnhandledCuda|Internal|Remote)Error|ncclInvalidUsage|DistBackendError: .*NCCL",
        "NCCL_DEBUG=INFO in os.environ before the launch makes NCCL say why, in the rank's output.",
    ),
    KnownMistake(r"EADDRINUSE|[Aa]ddress already in use", "Leave out use_port, and any free port is taken."),
    KnownMistake(
        r"[Dd]efault process group has not been initialized", "Make an Accelerator() before: it connects the ranks."
    ),
    KnownMistake(
        r"Please make sure to properly initialize your accelerator",
        "A Trainer of transformers, or an Accelerator of accelerate, came from the notebook: make it in the function that is launched.",
    ),
)


def advice_on(error: BaseException) -> str:
    """A sentence on what to do about an exception, its causes or the exceptions of a group; empty for what is not known."""
    for link in _all_of(error):
        if reached := limit_reached(link, int(os.environ.get("WORLD_SIZE", "1"))):
            return f"{reached[0].upper()}{reached[1:]}"
        calls = "\n".join(f"{frame.filename} {frame.name}" for frame in extract_tb(link.__traceback__))
        if found := _found(f"{type(link).__name__}: {message_of(link)}", calls):
            return found
    return ""


def advice_on_death(signal_name: str, last_lines: Sequence[str]) -> str:
    """A sentence on what to do about a process that ended without an exception, from its signal and what it wrote last."""
    if signal_name == "SIGKILL":
        return "The machine's memory may be full: take fewer processes, a smaller batch, or less data at once."
    if signal_name == "SIGBUS":
        return _found("Bus error", "")
    return _found("\n".join(last_lines), "")


def _found(text: str, calls: str) -> str:
    for case in _CASES:
        if re.search(case.pattern, text, re.DOTALL) and re.search(case.calls, calls):
            return case.todo
    return ""


def _all_of(error: BaseException | None, depth: int = 0) -> Iterator[BaseException]:
    # a chain of causes may bite its tail
    if error is None or depth > 10:
        return
    yield error
    for inner in getattr(error, "exceptions", ()):
        yield from _all_of(inner, depth + 1)
    yield from _all_of(error.__cause__ or (None if error.__suppress_context__ else error.__context__), depth + 1)

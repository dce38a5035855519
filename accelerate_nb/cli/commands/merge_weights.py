"""`accelerate-nb merge-weights`: one file of the weights of a sharded checkpoint."""

import argparse

from accelerate_nb.cli.parser import spellings

_EXAMPLES = """examples:
  accelerate-nb merge-weights checkpoint merged        write merged/model.safetensors
  accelerate-nb merge-weights checkpoint/pytorch_model_fsdp_0 merged --remove
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command: Accelerate's own names, and those of this package."""
    parser.description = (
        "Make one file of the shards that FSDP (SHARDED_STATE_DICT) or torch.distributed.checkpoint wrote.\n"
        "The file is written whole or not at all. A safetensors file is written piece by piece: the weights\n"
        "need not fit in memory."
    )
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="The folder of shards, or the checkpoint in which there is one for the model.",
    )
    parser.add_argument("output", metavar="OUTPUT", help="The folder in which the file is written.")
    formats = parser.add_mutually_exclusive_group()
    formats.add_argument(
        *("--safe", *spellings("safe_serialization")),
        dest="safe",
        action="store_true",
        default=True,
        help="Write model.safetensors (the default).",
    )
    formats.add_argument(
        *("--unsafe", *spellings("unsafe_serialization")),
        dest="safe",
        action="store_false",
        help="Write pytorch_model.bin, torch's own format, with all that was saved.",
    )
    parser.add_argument(
        *("--remove", *spellings("remove_checkpoint_dir")),
        dest="remove",
        action="store_true",
        help="Delete the shards, after the file was compared with them.",
    )
    parser.add_argument("--overwrite", action="store_true", help="Replace a file that is there already.")


def run(arguments: argparse.Namespace) -> int:
    """Merge, and print what was written."""
    from accelerate_nb.runtime.checkpoints import shards as merging

    merged = merging.merge(
        arguments.checkpoint,
        arguments.output,
        safe=arguments.safe,
        replaces=arguments.overwrite,
        removes=arguments.remove,
    )
    print(f"{merged.path}: {merged.tensors} tensors, {merged.bytes / 1e9:.3g} GB, from {merged.shards}")
    if merged.left_out:
        print(f"Not among the weights, and left out: {', '.join(merged.left_out)}")
    if merged.removed:
        print(f"Removed: the shards in {merged.shards}")
    return 0

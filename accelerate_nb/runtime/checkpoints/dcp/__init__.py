"""Checkpoints in parts, in the format of torch.distributed.checkpoint."""

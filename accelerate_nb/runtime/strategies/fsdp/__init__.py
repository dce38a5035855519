"""Weights sharded over processes: the second version of FSDP, its settings and its files."""

"""The per-node half of a run: it starts workers, reads what they send, and carries out what the worker group decides."""

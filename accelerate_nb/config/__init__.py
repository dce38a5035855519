"""The wish: what a run should be, said once."""

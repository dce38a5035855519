"""A session's worker: runs cells until it is closed."""

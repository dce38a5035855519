"""A checkpoint's files on the disk: written, synced, renamed."""

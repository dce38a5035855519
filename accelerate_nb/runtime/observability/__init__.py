"""Logging, progress bars, profiling, the self-test."""

"""The supervisor process, which forks the workers of this machine."""

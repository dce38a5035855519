"""The command line `accelerate-nb`: each command is one file, loaded when it is called."""

"""The subcommands of `accelerate-nb`, one file each."""

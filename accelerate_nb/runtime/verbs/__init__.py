"""What an `Accelerator` can be asked to do, in groups of verbs that belong together."""

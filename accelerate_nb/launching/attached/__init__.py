"""Launchers called in processes that a launcher has started already, such as torchrun."""

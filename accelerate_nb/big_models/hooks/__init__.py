"""Hooks around the forward of modules: device alignment, offloading, layer-wise casting."""

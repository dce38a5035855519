"""A run that is launched on each of several nodes: where they find each other, and how one of them conducts it for all."""

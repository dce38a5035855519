"""How the devices of one process share a training."""

"""The hardware of this machine, found without waking a driver."""

"""What hardware is here, found without waking a driver."""

"""The parts of the form in which a configuration is picked."""

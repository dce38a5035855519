"""The events of a run, their transport and the state that they add up to."""

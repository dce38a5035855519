"""Device maps: which module of a large model goes where."""

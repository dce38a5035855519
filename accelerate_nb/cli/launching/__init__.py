"""The targets of `accelerate-nb launch`: a script, a module, a notebook, a TPU pod."""

"""Options of a strategy, in Accelerate's words: each a setting that is a mapping."""

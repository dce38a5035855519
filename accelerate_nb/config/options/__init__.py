"""Options of single strategies, twins of `runtime/strategies/`."""

"""Names that raise `NotYetError`: plugins of strategies that are not there yet."""

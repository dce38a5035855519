"""The nodes of a run on several machines: where their agents are placed, and the connections to them."""

"""A pod: one namespace on many nodes. This room has the engine that carries news, the feed, and its followers."""

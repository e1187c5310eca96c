"""`transformers serve` over the engine."""

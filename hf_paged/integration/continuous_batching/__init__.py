"""transformers' continuous batching over the engine."""

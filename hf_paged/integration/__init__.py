"""Everything that touches transformers' models and its `generate`."""

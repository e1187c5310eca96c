"""The operations of low-rank adapters, one a file."""

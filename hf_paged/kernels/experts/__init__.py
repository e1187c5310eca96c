"""The operations of a block of experts, one a file: reference, kernel, dispatch."""

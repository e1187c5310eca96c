"""The operations of a decoder layer, one a file: reference, kernel, dispatch."""

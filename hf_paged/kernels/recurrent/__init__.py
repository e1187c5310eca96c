"""The operations of layers with a recurrent state, one a file: reference, kernel, dispatch."""

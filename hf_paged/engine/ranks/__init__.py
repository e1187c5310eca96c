"""Ranks of a sharded model: the commands that they carry out alike, and the weights that rank 0 sends."""

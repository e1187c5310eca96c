"""Compiling kernels: in threads and processes, ahead of their first launch."""

"""Kernels for Hopper alone."""

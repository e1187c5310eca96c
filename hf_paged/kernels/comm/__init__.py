"""Kernels in which several GPUs meet."""

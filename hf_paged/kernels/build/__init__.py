"""Compiling kernels: side by side, ahead of their first launch, in processes of their own."""

"""Attention of a step, above the kernels: backends plan on the host what kernels run on the device."""

"""One file an op: the torch reference that defines what is right, a Triton kernel, and a dispatch between them."""

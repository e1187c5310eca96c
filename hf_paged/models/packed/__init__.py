"""4-bit layers of bitsandbytes: what is read of them, and whether they run by copies, by kernels or as they stand."""

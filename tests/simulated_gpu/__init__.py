"""A GPU that is not there: the PTX that Triton makes for it runs on a CPU, a block at a time, with all its threads.

Other than Triton's interpreter, which runs a kernel's Python, this shows what the compiler made of it: that each
address is aligned for as many bytes as are read at once and lies inside of a tensor, that no byte of shared memory is
read before it is written, that no warp reads what another one writes without a barrier between them, and that no block
reads what another one writes. Copies beside the threads (``cp.async``) happen as late as they may: where threads wait
for them; and what a product beside the threads reads (``wgmma``) stays until then. What is not shown: the machine code
that ``ptxas`` makes, time, and kernels that follow addresses which a tensor holds.

``SIMULATED_GPU=1 pytest tests/kernels/...`` runs tests of kernels by it.
"""

"""An attention backend for graphs without a GPU."""

from hf_paged.kernels.attention.backends import TorchBackend, TritonBackend


class PlannedTorch(TorchBackend):
    """The reference, for steps that are planned as on a GPU."""

    plan = TritonBackend.plan

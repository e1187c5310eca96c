"""An attention backend for graphs without a GPU."""

from hf_paged.attention.torch_backend import TorchBackend
from hf_paged.attention.triton_backend import TritonBackend


class PlannedTorch(TorchBackend):
    """The reference, for steps that are planned as on a GPU."""

    plan = TritonBackend.plan

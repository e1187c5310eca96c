"""Remedies that several reasons share: what to change in a model that is not as its class promises."""

from __future__ import annotations

REMOVE_HOOK = "Remove the hook, or leave it: stock runs it."
UNDO_REPLACEMENT = "Undo the replacement. Known wrappers are those of `torch.compile`, accelerate and TRL."
UNDO_PATCH = ("Some code replaced a function or class of transformers or torch, or a subclass overrides it. Undo it, "
              "or use the class itself.")
PUT_BACK = "A module was exchanged for one of another class. Put transformers' class back."
OWN_ATTENTION = "Call `model.set_attn_implementation(\"sdpa\")`."
FLASH_KERNEL = ("Kernels with FlashAttention's function (`kernels-community/flash-attn2`) are known; pages then "
                "compute what they compute. Another kernel may attend to something else: load the model with "
                "`attn_implementation=\"sdpa\"` if it does not.")
EACH_ROW_ALONE = ("A layer may give a token another result beside other tokens. Quantize the weights only, or "
                  "activations per token; docs/callers.md lists the layers that are known to compute each row alone.")
QUANTIZE_LINEAR = "A norm or a block of experts has a quantized weight. Quantize linear layers and embeddings only."
DEQUANTIZE = "A tensor of a special class is part of the model. Dequantize it, or keep it out of the modules."
ONE_DEVICE = ("Put the whole model on one device. For a model that needs several GPUs use "
              "`PagedGenerator.from_pretrained(..., tensor_parallel_size=N)`.")
ONE_DTYPE = "Call `model.to(torch.bfloat16)`, or load it with `dtype=` one of fp32, fp16 and bf16."
DTYPE_OF_AUTOCAST = ("Autocast is native to bf16 or fp16, on one GPU. Load the weights in its dtype (TRL: "
                     "`model_init_kwargs={\"dtype\": \"bfloat16\"}`), or generate outside of autocast.")
EVAL_MODE = "Call `model.eval()` before generating, and `model.train()` after it."
ENABLE_AGAIN = "Disable the model, and enable it again."
SHARD = ("Load the checkpoint with `PagedGenerator.from_pretrained(..., tensor_parallel_size=N)`, or gather the "
         "weights before generating.")
GATHER = ("Generate inside of `deepspeed.zero.GatheredParameters(model.parameters())`, with DeepSpeed's hooks taken "
          "off, as TRL does it.")
DISAGREE = ("Config and modules disagree, or describe no causal model. Make them agree: `type(model).from_pretrained` "
            "does.")

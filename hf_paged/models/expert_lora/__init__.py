"""PEFT's LoRA on experts' weights (`target_parameters`): by views of the experts, and what kernels read of it."""

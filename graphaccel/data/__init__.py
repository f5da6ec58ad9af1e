"""Token files, in Megatron-LM's layout, and rows of tokens cut from them for training."""

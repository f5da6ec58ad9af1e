"""Passes that recompute or offload the activations saved for the backward."""

"""Runs the stages of a plan over torch.distributed.

Nothing is imported here: `graphaccel.runtime.launch` must start without torch.
"""

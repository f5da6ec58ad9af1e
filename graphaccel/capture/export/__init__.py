"""Export of a forward with its loss, and what torch.export alone would not capture or would
refuse."""
